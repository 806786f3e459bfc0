"""Which way of fetching wins: gather kernel, bulk copies or the copy engine, by block bytes, count and fragment layout.

Times come from a bundle's ``link_runs`` table alone (measured, or interpolated between measured points); what lies
outside it is None, not guessed. ``dma`` is one batched copy call, a copy engine's transfer for every run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nosa_sys.errors import HardwareError
from nosa_sys.kv_format import KvFormat
from nosa_sys.simulator.bundle_tables import read_table
from nosa_sys.simulator.hardware import profile_directory

PATHS = {"uva": "gather kernel", "bulk": "bulk-copy kernel", "dma": "copy engine, batched"}
# How K and V of a block of one head lie in host memory: (name, runs a block, their share of its bytes).
LAYOUTS = ("K and V together", "K and V apart", "a row a token")


@dataclass(frozen=True)
class PathTime:
    """One way of moving ``n_runs`` runs of ``run_bytes``: its time alone and rate, None outside what was measured."""

    path: str
    run_bytes: int
    n_runs: int
    time_us: float | None

    @property
    def gbps(self) -> float | None:
        return None if self.time_us is None else self.run_bytes * self.n_runs / self.time_us / 1e3


class FetchPaths:
    """Host-to-device times of a bundle by path, run size and count, the fastest number of CTAs for each point."""

    def __init__(self, hardware: str | Path) -> None:
        directory = profile_directory(hardware)
        rows = read_table(directory, "link_runs")
        if not {"direction", "path", "run_bytes", "n_runs", "median_us"} <= set(rows):
            raise HardwareError(
                f"{directory} has no link_runs table by path; fetch paths need a bundle that was measured on a GPU"
            )
        self._us: dict[str, dict[int, dict[int, float]]] = {}
        for i in np.flatnonzero(rows["direction"] == "h2d"):
            counts = self._us.setdefault(str(rows["path"][i]), {}).setdefault(int(rows["run_bytes"][i]), {})
            count, us = int(rows["n_runs"][i]), float(rows["median_us"][i])
            counts[count] = min(us, counts.get(count, math.inf))

    def time(self, path: str, run_bytes: int, n_runs: int) -> PathTime:
        """Interpolated on logarithms, first over the count, then over the size of a run."""
        sizes = self._us.get(path, {})
        below = max((size for size in sizes if size <= run_bytes), default=None)
        above = min((size for size in sizes if size >= run_bytes), default=None)
        if below is None or above is None:
            return PathTime(path, run_bytes, n_runs, None)
        ends = [_interpolated(sizes[size], n_runs) for size in (below, above)]
        if ends[0] is None or ends[1] is None:
            return PathTime(path, run_bytes, n_runs, None)
        us = _interpolated({below: ends[0], above: ends[1]}, run_bytes)
        return PathTime(path, run_bytes, n_runs, us)

    def compare(self, run_bytes: int, n_runs: int) -> list[PathTime]:
        """Every path, the fastest first, those that were not measured last."""
        found = [self.time(path, run_bytes, n_runs) for path in PATHS]
        return sorted(found, key=lambda one: (one.time_us is None, one.time_us or 0.0))

    def crossover(self, run_bytes: int) -> int | None:
        """The fewest runs from which the copy engine beats the gather at this and every larger measured count; None
        where the largest count at which both were measured goes to the gather, or where there is none."""
        counts = sorted({n for sizes in self._us.values() for by_count in sizes.values() for n in by_count})
        found = None
        for count in reversed(counts):
            dma, gather = (self.time(path, run_bytes, count).time_us for path in ("dma", "uva"))
            if dma is None or gather is None:
                continue
            if dma >= gather:
                break
            found = count
        return found


def _interpolated(points: dict[int, float], at: int) -> float | None:
    xs = sorted(points)
    if not xs[0] <= at <= xs[-1]:
        return None
    return float(np.exp(np.interp(math.log(at), np.log(xs), np.log([points[x] for x in xs]))))


def fragments(
    paths: FetchPaths, *, head_dim: int, kv_format: str, n_blocks: int, block_sizes: tuple[int, ...] = (16, 32, 64, 128)
) -> Iterator[dict[str, Any]]:
    """The cliff of small fragments: ``n_blocks`` blocks of each size under each layout, the rate of every path.

    Keys: block_size, layout, run_bytes, n_runs, a column of GB/s for each path, ``wins`` and what it gives.
    """
    for block_size in block_sizes:
        block_bytes = KvFormat.parse(kv_format).block_bytes(block_size, head_dim)
        for layout, runs in zip(LAYOUTS, (1, 2, 2 * block_size), strict=True):
            compared = paths.compare(block_bytes // runs, n_blocks * runs)
            best = compared[0]
            yield {
                "block_size": block_size,
                "layout": layout,
                "run_bytes": block_bytes // runs,
                "n_runs": n_blocks * runs,
                **{one.path: one.gbps for one in sorted(compared, key=lambda one: list(PATHS).index(one.path))},
                "wins": None if best.time_us is None else best.path,
            }
