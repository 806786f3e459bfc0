"""``nosa results``: the committed measurements and the simulator's lines in one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nosa_sys.cli import console as out
from nosa_sys.cli.options import JsonFlag, Overwrite
from nosa_sys.outputs import check_output, write_whole

NAME = "results"


def command(
    out_file: Annotated[Path, typer.Option("--out", help="The HTML file to write.")],
    results: Annotated[Path, typer.Option("--results", help="Result files.")] = Path("experiments/results"),
    hardware: Annotated[str, typer.Option("--hardware", help="Profile of the simulated lines.")] = "h200-engine",
    overwrite: Overwrite = False,
    json: JsonFlag = False,
) -> None:
    """Measured dots on simulated lines; a figure whose rows are not there names the command that makes them.

    Example: [bold]nosa results --out out/results.html[/bold]
    """
    check_output(out_file, overwrite=overwrite)
    from nosa_sys.report.results_page.page import build_results_page  # plotly takes its time

    page = build_results_page(results, hardware)
    write_whole(out_file, page.html, overwrite=overwrite)
    console = out.human(json)
    for section in page.sections:
        console.print(f"{section.title}: {section.headline or '-'}", highlight=False, markup=False)
        for text in section.missing:
            console.print(f"  not there yet: {text}", highlight=False, markup=False)
    shown = [section.key for section in page.sections if not section.empty]
    console.print(f"{out_file}: {len(shown)} figures, {len(page.html) / 1e6:.1f} MB, opens offline")
    if json:
        document = {
            "kind": "results",
            "file": str(out_file),
            "figures": shown,
            "headlines": {section.key: section.headline for section in page.sections if not section.empty},
            "missing": {section.key: list(section.missing) for section in page.sections if section.missing},
            "bytes": len(page.html),
        }
        out.print_json(document)
