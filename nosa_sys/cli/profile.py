"""``nosa profile``: measure this machine into a profile bundle that ``nosa simulate --hardware DIR`` prices with."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from nosa_sys.cli import console as out
from nosa_sys.cli.options import DryRun, JsonFlag, Overwrite
from nosa_sys.errors import ConfigError
from nosa_sys.model_shape import PRESETS, ModelShape
from nosa_sys.outputs import check_output, whole_directory

NAME = "profile"
DEVICES = ("auto", "cuda", "cpu")


def command(
    out_dir: Annotated[Path, typer.Option("--out", help="Where the bundle goes.")],
    device: Annotated[str, typer.Option("--device", help="auto, cuda or cpu.")] = "auto",
    name: Annotated[str | None, typer.Option("--name", help="Name of the profile; default: that of --out.")] = None,
    model_shape: Annotated[
        list[str] | None,
        typer.Option(
            "--model-shape", help="Shapes whose matrices are timed (repeatable); default: all presets on a GPU."
        ),
    ] = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: JsonFlag = False,
) -> None:
    """Measure copies, kernels, matrices, contention and overheads; under 8 minutes on an H200.

    Example: [bold]nosa profile --out out/profile[/bold]
    """
    if device not in DEVICES:
        raise ConfigError(f"--device {device!r} must be one of {', '.join(DEVICES)}")
    import torch

    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ConfigError("--device cuda: torch sees no GPU here; use --device cpu")
    chosen = "cuda" if device == "cuda" or (device == "auto" and has_gpu) else "cpu"
    names = model_shape or (list(PRESETS) if chosen == "cuda" else ["smollm2-135m"])
    shapes = [ModelShape.resolve(shape) for shape in names]
    if chosen == "cpu" and len(shapes) != 1:
        raise ConfigError(f"a CPU is profiled for one model shape, got {len(shapes)}; give one --model-shape")
    check_output(out_dir, overwrite=overwrite)
    title = name or out_dir.name
    console = out.stderr()
    console.print(
        out.facts(
            "nosa profile",
            [("name", title), ("device", chosen), ("model shapes", ", ".join(names)), ("out", str(out_dir))],
        )
    )
    if dry_run:
        return
    start = time.perf_counter()
    n_points = 0
    with out.progress(console) as bar, whole_directory(out_dir, overwrite=overwrite) as partial:
        task = bar.add_task("measuring", total=None, note="")

        def progress(table: str, row: dict[str, Any]) -> None:
            nonlocal n_points
            n_points += 1
            bar.update(task, completed=n_points, note=table)

        if chosen == "cuda":
            from nosa_sys.profiling.cuda_profile import profile_cuda

            profile_cuda(partial, title, shapes, progress)
        else:
            from nosa_sys.profiling.cpu_profile import profile_cpu

            profile_cpu(partial, title, shapes[0], progress)
    from nosa_sys.simulator.hardware import load_hardware

    profile = load_hardware(out_dir)
    seconds = time.perf_counter() - start
    numbers = {key: getattr(profile, key) for key in profile.sources}
    console = out.human(json)
    console.print(
        out.table(
            f"measured on {profile.device}: {n_points} points in {seconds:.0f} s",
            ("number", "value", "from"),
            [(key, numbers[key], profile.sources[key]) for key in numbers],
        )
    )
    if json:
        out.print_json(
            {"profile": title, "out": str(out_dir), "status": profile.status, "seconds": seconds, "numbers": numbers}
        )
