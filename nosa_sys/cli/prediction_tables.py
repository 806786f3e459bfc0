"""What stands beside a prediction: how well its models fit, how far it is extrapolated, which fetch path would win."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nosa_sys.cli import console as out
from nosa_sys.errors import HardwareError
from nosa_sys.model_shape import ModelShape

if TYPE_CHECKING:
    from nosa_sys.simulator.fetch_paths import FetchPaths


def error_table(errors: list[dict[str, Any]], hardware: str) -> Any:
    """Leave-one-out errors of the fits of a profile, one row a fit."""
    rows = [
        (one["name"], one["n_points"], *(f"{one[key]:.1%}" for key in ("median", "p90", "worst"))) for one in errors
    ]
    title = f"leave-one-out errors of the models of {hardware} (each point predicted from all others)"
    return out.table(title, ("model", "points", "median", "p90", "worst"), rows)


def fetch_path_document(paths: FetchPaths, document: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Paths at this situation's block bytes and mean fetch, and the same number of blocks by size and layout."""
    from nosa_sys.simulator.fetch_paths import PATHS, fragments

    settings = document["settings"]
    per_launch = document["misses_per_head_step"] * settings["batch"] * shape.n_kv_heads
    n_blocks = round(per_launch)
    if n_blocks < 1:
        raise HardwareError(f"{per_launch:.2f} blocks are fetched a layer and step: there is no fetch to compare")
    here = paths.compare(settings["block_bytes"], n_blocks)
    kv_format = settings["host_kv_dtype"] or shape.dtype
    return {
        "status": "measured points of the profile on its own link, interpolated between them; each path alone",
        "block_bytes": settings["block_bytes"],
        "n_blocks": n_blocks,
        "paths": [
            {"path": one.path, "what": PATHS[one.path], "time_us": one.time_us, "gbps": one.gbps} for one in here
        ],
        "copy_engine_wins_from": paths.crossover(settings["block_bytes"]),
        "fragments": list(fragments(paths, head_dim=shape.head_dim, kv_format=kv_format, n_blocks=n_blocks)),
    }


def fetch_path_tables(found: dict[str, Any]) -> list[Any]:
    """Two tables of `fetch_path_document`."""
    crossover = found["copy_engine_wins_from"]
    wins = (
        "does not win at the largest measured count"
        if crossover is None
        else f"wins from {crossover} blocks a launch on"
    )
    rows = [(one["path"], one["what"], one["time_us"], one["gbps"]) for one in found["paths"]]
    what = f"fetch of {found['n_blocks']} blocks of {found['block_bytes']:,} bytes"
    title = f"{what} on the profile's own link; the copy engine {wins}"
    columns = ("block_size", "layout", "run_bytes", "n_runs", "uva", "bulk", "dma", "wins")
    cliff = [tuple(row[name] for name in columns) for row in found["fragments"]]
    return [
        out.table(title, ("path", "what", "us", "GB/s"), rows),
        out.table(
            f"{found['n_blocks']} blocks by size and layout, GB/s (-: not measured)",
            ("block", "layout", "bytes a run", "runs", "uva", "bulk", "dma", "wins"),
            cliff,
        ),
    ]
