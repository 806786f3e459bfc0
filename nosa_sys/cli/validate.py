"""``nosa validate``: engine cells measured on this machine, held against the simulator's predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from nosa_sys.cli import console as out
from nosa_sys.cli.decode_progress import DecodeProgress
from nosa_sys.cli.options import DryRun, JsonFlag, Overwrite
from nosa_sys.outputs import check_output, whole_directory

NAME = "validate"
EXIT_FAILED = 1


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="Cells, thresholds and the model's shape.")],
    out_dir: Annotated[Path, typer.Option("--out", help="Directory of validation.json and cells.parquet.")],
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", help="Profile or bundle; default: the recipe's, or this CPU is profiled first."),
    ] = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: JsonFlag = False,
) -> None:
    """Run the engine in cells that calibration did not use and compare step times; status 1 past a threshold.

    A recipe of kind gpu runs on a CUDA device, calibrating in the same session unless --hardware has engine terms.
    Example: [bold]nosa validate experiments/validate-cpu.yaml --out out/validate[/bold]
    """
    from nosa_sys.experiments.gpu_validation_recipe import is_gpu_recipe

    if is_gpu_recipe(recipe):
        _on_gpu(recipe, out_dir, hardware, overwrite=overwrite, dry_run=dry_run, json=json)
        return
    from nosa_sys.experiments.validation_recipe import load_validation_recipe  # pydantic takes its time

    plan = load_validation_recipe(recipe)
    check_output(out_dir, overwrite=overwrite)
    chosen = hardware or plan.hardware
    facts = [
        ("recipe", plan.name),
        ("model", plan.model or f"random weights, shape {plan.model_shape}"),
        ("cells", f"{len(plan.cells)}, each {plan.runs} runs of {plan.steps} warm steps, the fastest counts"),
        ("hardware", chosen or "this CPU, profiled first"),
        ("threads", str(plan.threads)),
        ("thresholds", ", ".join(f"{k} {v:.0%}" for k, v in plan.thresholds.model_dump().items() if v is not None)),
    ]
    out.stderr().print(out.facts(f"validate {recipe}", facts))
    if dry_run:
        if json:
            out.print_json({"kind": "validation", "dry_run": True, "n_cells": len(plan.cells)})
        return
    from nosa_sys.experiments.validation import validate
    from nosa_sys.simulator.hardware import load_hardware

    if chosen is not None:
        load_hardware(chosen)  # refuse a bad bundle before any work
    with DecodeProgress(out.stderr()) as progress, whole_directory(out_dir, overwrite=overwrite) as partial:
        document = validate(plan, partial, progress, hardware=hardware)
    console = out.human(json)
    console.print(cells_table(document))
    for line in document["exceeded"]:
        out.stderr().print(f"exceeded: {line}", markup=False)
    if json:
        out.print_json(document)
    if not document["ok"]:
        raise typer.Exit(EXIT_FAILED)


def _on_gpu(path: Path, out_dir: Path, hardware: str | None, *, overwrite: bool, dry_run: bool, json: bool) -> None:
    """A recipe of kind gpu."""
    from nosa_sys.experiments.gpu_validation_recipe import load_gpu_recipe
    from nosa_sys.simulator.hardware import load_hardware

    plan = load_gpu_recipe(path)
    check_output(out_dir, overwrite=overwrite)
    calibrated = load_hardware(hardware or plan.hardware).engine is not None
    facts = [
        ("recipe", plan.name),
        ("settings", ", ".join(f"{n} of {shape}" for shape, n in plan.settings.items())),
        ("each", f"{plan.windows} windows of {plan.steps} steps under every schedule; the median counts"),
        ("hardware", f"{hardware or plan.hardware}" + ("" if calibrated else ", calibrated on the engine first")),
        ("time", f"at most {plan.max_minutes:g} minutes of measuring"),
        ("thresholds", ", ".join(f"{k} {v:.0%}" for k, v in plan.thresholds.model_dump().items() if v is not None)),
    ]
    out.stderr().print(out.facts(f"validate {path}", facts))
    if dry_run:
        if json:
            out.print_json({"kind": "validation", "dry_run": True, "n_settings": sum(plan.settings.values())})
        return
    from nosa_sys.experiments.gpu_validation import report_lines, validate_gpu

    def say(text: str) -> None:
        out.stderr().print(text, markup=False, highlight=False)

    with whole_directory(out_dir, overwrite=overwrite) as partial:
        document = validate_gpu(plan, partial, say, hardware=hardware, calibrate=not calibrated)
    console = out.human(json)
    for text in report_lines(document):
        console.print(text, markup=False, highlight=False)
    if json:
        out.print_json(document)
    if not document["ok"]:
        raise typer.Exit(EXIT_FAILED)


def cells_table(document: dict[str, Any]) -> Any:
    """A row a cell, predicted capacity first, failed ones with their reason, then median, p90 and worst.

    GPU and host bytes and the batch that fits were held against the engine's own plan before the cell ran.
    """
    rows: list[tuple[Any, ...]] = []
    for row in document["cells"]:
        what = f"{row['method']} b{row['batch']} k{row['topk']} block {row['block_size']} slots {row['slots']}"
        if row.get("error") is None:
            rows.append((what, row["context"], *[None] * 5, row["failed"]))
            continue
        note = row["failed"] or f"{row['error']:+.1%}"
        gpu, host, fits = (row.get(f"predicted_{name}") for name in ("gpu_bytes", "host_pool_bytes", "batch_that_fits"))
        capacity = (out.size(gpu), out.size(host), fits)
        rows.append((what, row["context"], *capacity, row["measured_step_us"], row["predicted_step_us"], note))
    for name, value in document["errors"].items():
        rows.append((f"{name} of |error|", *[None] * 6, "none" if value is None else f"{value:.1%}"))
    title = (
        f"{document['name']} on {document['device']}: measured, and {document['status']} from {document['hardware']}"
    )
    return out.table(title, ("cell", "context", "GPU", "host", "fits", "measured, us", "predicted, us", "error"), rows)
