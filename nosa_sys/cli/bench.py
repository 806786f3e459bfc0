"""``nosa bench``: the GPU kernels on their own case lists beside the ceiling of the same run, and decode throughput."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from nosa_sys.cli import bench_decode
from nosa_sys.cli import console as out
from nosa_sys.cli.options import JsonFlag, Overwrite
from nosa_sys.errors import ConfigError
from nosa_sys.outputs import check_output, write_whole

app = typer.Typer(help="Benchmarks of this machine: kernels, decode.", no_args_is_help=True)
app.command("decode")(bench_decode.command)


@app.command("kernels")
def kernels(
    ops: Annotated[str | None, typer.Option("--ops", help="Operations, comma separated; default: all.")] = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="Also write every row as JSON.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the inputs.")] = 0,
    overwrite: Overwrite = False,
    json: JsonFlag = False,
) -> None:
    """Median of graph replays with the L2 flushed, GB/s, share of the ceiling, torch or vendor baseline beside it.

    Example: [bold]nosa bench kernels --ops block_fetch,sparse_decode_attention[/bold]
    """
    import torch

    from nosa_sys.kernels.registry import OPERATION_MODULES

    names = tuple(ops.split(",")) if ops else OPERATION_MODULES
    unknown = [name for name in names if name not in OPERATION_MODULES]
    if unknown:
        raise ConfigError(f"--ops: unknown operation {unknown[0]!r}; known: {', '.join(OPERATION_MODULES)}")
    if not torch.cuda.is_available():
        raise ConfigError("kernel benchmarks need an NVIDIA GPU, and torch sees none here")
    if out_file:
        check_output(out_file, overwrite=overwrite)
    from nosa_sys.kernels.bench import bench_kernels, format_row
    from nosa_sys.kernels.timing import environment

    rows = []
    console = out.human(json)
    for row in bench_kernels(names, seed=seed):
        rows.append(row)
        console.print(format_row(row), soft_wrap=True)
    document = {"status": "measured", "environment": environment(), "rows": rows}
    if out_file:
        write_whole(out_file, json_module.dumps(out.plain(document), indent=1) + "\n", overwrite=overwrite)
    if json:
        out.print_json(document)
