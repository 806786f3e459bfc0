"""``nosa report``: one self-contained HTML page out of traces, replays, predictions and sweeps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nosa_sys.cli import console as out
from nosa_sys.cli.options import JsonFlag, Overwrite
from nosa_sys.outputs import check_output, write_whole

NAME = "report"


def command(
    inputs: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Traces, replays, predictions, sweeps.")],
    out_file: Annotated[Path, typer.Option("--out", help="The HTML file to write.")],
    title: Annotated[str, typer.Option("--title", help="Heading of the page.")] = "NOSA report",
    overwrite: Overwrite = False,
    json: JsonFlag = False,
) -> None:
    """Draw what the directories hold; figures without data are left out, missing values are gaps.

    Example: [bold]nosa report out/trace out/sweep --out report.html[/bold]
    """
    check_output(out_file, overwrite=overwrite)
    from nosa_sys.report.inputs import load_inputs  # plotly takes its time
    from nosa_sys.report.page import build_page

    data = load_inputs(inputs)
    page = build_page(data, title=title)
    write_whole(out_file, page.html, overwrite=overwrite)
    console = out.human(json)
    console.print(f"{out_file}: {len(page.figures)} figures, {len(page.html) / 1e6:.1f} MB, opens offline")
    if json:
        out.print_json({"kind": "report", "file": str(out_file), "figures": page.figures, "bytes": len(page.html)})
