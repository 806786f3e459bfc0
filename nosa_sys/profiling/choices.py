"""Which fetch path and how many CTAs, out of a profile's tables: alone, beside compute, and where batched DMA wins."""

from __future__ import annotations

from typing import Any

import pandas as pd

Rows = list[dict[str, Any]]
# Alone, a copy should reach this share of the best rate at many runs; of those that do, the fastest at few runs wins.
_NEAR_BEST = 0.98
_RUN_BYTES = 32768
_FEW_RUNS = 64


def fetch_choices(link_runs: Rows, contention: Rows) -> dict[str, Any]:
    """``alone``, ``beside_gemm``, ``beside_attention``: {path, n_ctas}; ``dma_crossover``: one entry a run size, the
    fewest runs from which the batched copy call is faster than the gather kernel, None where it never was."""
    runs = pd.DataFrame(link_runs)
    up = runs[runs["direction"] == "h2d"]
    gather = up[(up["path"] == "uva") & (up["run_bytes"] == _RUN_BYTES)]
    many = gather[gather["n_runs"] == gather["n_runs"].max()].set_index("n_ctas")["median_us"]
    fast_enough = many.index[many <= many.min() / _NEAR_BEST]
    few = gather[(gather["n_runs"] == _FEW_RUNS) & gather["n_ctas"].isin(fast_enough)]
    fastest = few.sort_values("median_us").iloc[0]
    chosen: dict[str, Any] = {"alone": {"path": "uva", "n_ctas": int(fastest["n_ctas"])}}
    for compute, rows in pd.DataFrame(contention).groupby("compute"):
        shortest = rows.sort_values("both_us").iloc[0]
        chosen[f"beside_{compute}"] = {"path": str(shortest["path"]), "n_ctas": int(shortest["n_ctas"])}
    crossover: dict[str, int | None] = {}
    for size in sorted(up["run_bytes"].unique()):
        rows = up[up["run_bytes"] == size]
        best = {
            path: rows[rows["path"] == path].groupby("n_runs")["median_us"].min().to_dict() for path in ("dma", "uva")
        }
        faster = [n for n, time_us in best["dma"].items() if time_us < best["uva"].get(n, 0.0)]
        crossover[str(size)] = int(min(faster)) if faster else None
    chosen["dma_crossover"] = crossover
    return chosen
