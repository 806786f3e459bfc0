"""``nosa demo``: the whole path on one machine, from a real document to a predicted throughput and a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nosa_sys.cli import console as out
from nosa_sys.cli.options import JsonFlag, Overwrite
from nosa_sys.outputs import check_output

NAME = "demo"


def command(
    out_dir: Annotated[Path, typer.Option("--out", help="Where everything goes.")] = Path("out/demo"),
    new_tokens: Annotated[int, typer.Option("--new-tokens", help="Tokens to decode.", min=64)] = 64,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")] = 0,
    overwrite: Overwrite = False,
    json: JsonFlag = False,
) -> None:
    """Capture a real document, check the theorem, replay, sweep, and write report.html (about two minutes on 2 cores).

    Example: [bold]nosa demo --out out/demo[/bold]
    """
    check_output(out_dir, overwrite=overwrite)
    from nosa_sys.cli.decode_progress import DecodeProgress
    from nosa_sys.cli.demo_tables import print_summary
    from nosa_sys.experiments.demo import run_demo  # torch takes its time

    console = out.stderr()
    document = run_demo(
        out_dir,
        new_tokens=new_tokens,
        seed=seed,
        overwrite=overwrite,
        say=lambda text: console.print(text, style="bold"),
        progress=lambda: DecodeProgress(console),
    )
    print_summary(out.human(json), document)
    if json:
        out.print_json(document)
    if not document["check"]["ok"]:
        raise typer.Exit(1)
