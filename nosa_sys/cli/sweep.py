"""``nosa sweep``: a recipe of situations, priced one by one, resumable, in a fixed order."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from nosa_sys.cli import console as out
from nosa_sys.cli.options import DryRun, JsonFlag, Overwrite

NAME = "sweep"


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="What to sweep.")],
    out_dir: Annotated[Path, typer.Option("--out", help="Directory of results.parquet and summary.json.")],
    workers: Annotated[int, typer.Option("--workers", help="Processes.", min=1)] = 1,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: JsonFlag = False,
) -> None:
    """Price every combination of a recipe; a second run takes up where the first stopped.

    Example: [bold]nosa sweep experiments/demo_sweep.yaml --out out/sweep --workers 2[/bold]
    """
    from nosa_sys.experiments.sweeps import run_sweep  # scipy and simpy take their time

    document = run_sweep(recipe, out_dir, workers=workers, overwrite=overwrite, dry_run=dry_run)
    console = out.human(json)
    console.print(out.facts(f"sweep {recipe.name}", [(key, _text(value)) for key, value in document.items()]))
    if json:
        out.print_json(document)


def _text(value: Any) -> str:
    return out.number(value) if not isinstance(value, (list, dict)) else str(out.plain(value))
