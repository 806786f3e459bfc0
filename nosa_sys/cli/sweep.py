"""``nosa sweep``: a recipe of situations, priced one by one, resumable, in a fixed order."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from nosa_sys.cli import console as out
from nosa_sys.cli.decode_progress import DecodeProgress
from nosa_sys.cli.options import DryRun, JsonFlag, Overwrite, Seed

NAME = "sweep"
_OPTIONAL = ("link", "h2d_gbps", "host_kv_dtype", "dequant_gbps", "dequant_fixed_us")


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="What to sweep.")],
    out_dir: Annotated[Path, typer.Option("--out", help="Directory of results.parquet and summary.json.")],
    workers: Annotated[int | None, typer.Option("--workers", help="Processes (default: all cores).", min=1)] = None,
    backend: Annotated[
        str, typer.Option("--backend", help="joblib (this machine) or ray (a cluster; pip install 'nosa-sys[ray]').")
    ] = "joblib",
    extrapolate: Annotated[
        bool | None, typer.Option("--extrapolate", help="Price beyond what the profile was measured at, and say so.")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            "--schedule", help="serial, fused_kv, split_merge, two_batch or prefetch, instead of the recipe's."
        ),
    ] = None,
    seed: Seed = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: JsonFlag = False,
) -> None:
    """Price every combination of a recipe; a second run takes up where the first stopped.

    Example: [bold]nosa sweep experiments/sweep-hot-buffer.yaml --out out/sweep --workers 2[/bold]
    """
    from nosa_sys.experiments.sweeps import check_sweep_output, run_sweep  # pydantic and scipy take their time
    from nosa_sys.simulator.recipe import load_recipe

    plan = load_recipe(recipe)
    origin = "flag" if seed is not None else "file"
    if seed is not None:
        plan = plan.model_copy(update={"seed": seed})
    schedule_origin = "flag" if schedule is not None else "file" if "schedule" in plan.model_fields_set else "default"
    if schedule is not None:
        plan = plan.model_copy(update={"schedule": schedule})
        plan.resolved_schedule()  # refuses an unknown one, and guesses for one that has none
    if extrapolate is not None:
        plan = plan.model_copy(update={"extrapolate": extrapolate})
    workers_origin = "default" if workers is None else "flag"
    n_workers = os.cpu_count() or 1 if workers is None else workers
    base = (
        plan.base.trace or f"synthetic, {plan.base.synthetic.model_shape}" if plan.base.synthetic else plan.base.trace
    )
    rows = [("recipe", plan.name, "file"), ("base", base, "file"), ("seed", plan.seed, origin)]
    rows.append(("schedule", plan.schedule, schedule_origin))
    rows += [(f"axis {name}", ", ".join(map(str, values)), "file") for name, values in plan.axes.given().items()]
    if plan.sobol is not None:
        ranges = plan.sobol.ranges().items()
        rows += [(f"range {k}", f"{v.low:g} to {v.high:g}" + (", log" if v.log else ""), "file") for k, v in ranges]
    rows += [(name, getattr(plan, name), "file") for name in _OPTIONAL if getattr(plan, name) is not None]
    rows += [("extrapolate", plan.extrapolate, "flag" if extrapolate is not None else "file or default")]
    rows += [("backend", backend, "default" if backend == "joblib" else "flag")]
    rows += [("configurations", plan.n_configurations, "derived"), ("workers", n_workers, workers_origin)]
    out.stderr().print(out.table(f"sweep {recipe}", ("setting", "value", "from"), rows))
    check_sweep_output(plan, out_dir, overwrite=overwrite and not dry_run)
    if dry_run:
        if json:
            out.print_json({"kind": "sweep", "dry_run": True, "n_configurations": plan.n_configurations})
        return
    with DecodeProgress(out.stderr()) as progress:
        document = run_sweep(plan, out_dir, workers=n_workers, backend=backend, progress=progress)
    best = document["best"] or {}
    facts = [
        ("configurations", out.number(document["n_configurations"])),
        ("refused, with the reason in the results", out.number(document["n_refused"])),
        ("outside what the profile was measured at", out.number(document["n_extrapolated"])),
        ("over the device's or host's memory", out.number(document["n_over_memory"])),
        ("limited by", ", ".join(f"{name} {count}" for name, count in document["limited_by"].items())),
        ("fastest that fits", ", ".join(f"{name} {out.number(value)}" for name, value in best.items())),
        ("results", str(out_dir / "results.parquet")),
    ]
    console = out.human(json)
    console.print(out.facts(f"sweep {document['name']} ({', '.join(document['status'])})", facts))
    if json:
        out.print_json(document)
