"""Speed of the sweep's fast path: configurations of 32 layers x 256 steps with given misses, priced one and all.

Run: python -m nosa_sys.simulator.bench_recurrence --configurations 1000 --workers 2
"""

from __future__ import annotations

import argparse
import json
import os
import time

import numpy as np
from joblib import Parallel, delayed

from nosa_sys.model_shape import ModelShape
from nosa_sys.simulator.hardware import load_hardware
from nosa_sys.simulator.schedules import SCHEDULES, get_schedule
from nosa_sys.simulator.simulate import price
from nosa_sys.simulator.workload import Workload
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.miss_table import LayerStepMisses

_AT_ONCE = 32  # configurations priced by one call
_N_STEPS = 256
_SPARE_SLOTS = 8  # for schedules that guess


def random_workload(rng: np.random.Generator, shape: ModelShape, sparse: SparseConfig) -> Workload:
    """Misses of a random batch, with births spread over the steps so that most steps write something back."""
    batch = int(rng.integers(1, 97))
    cells = (_N_STEPS, shape.n_layers)
    heads = batch * shape.n_kv_heads
    births = rng.binomial(batch, 1 / sparse.block_size, size=_N_STEPS) * shape.n_kv_heads
    misses = rng.binomial(heads * 15, rng.uniform(0.02, 0.4), size=cells)

    def loads(share: float) -> LayerStepMisses:
        rows = max(1, round(batch * share))
        return LayerStepMisses(
            steps=np.arange(_N_STEPS, dtype=np.int32),
            n_sequences=np.full(_N_STEPS, rows, dtype=np.int32),
            misses=(misses * share).astype(np.int64),
            filled_blocks=np.repeat((births * share).astype(np.int64)[:, None], shape.n_layers, axis=1),
            attended_blocks=np.full(cells, rows * shape.n_kv_heads * sparse.topk),
            context_tokens=rows * (16384 + np.arange(_N_STEPS)),
            cold=np.arange(_N_STEPS) == 0,
        )

    block_bytes = shape.kv_block_bytes(sparse.block_size)
    return Workload(
        loads(1.0), shape, sparse, "nosa", sparse.topk + _SPARE_SLOTS, "lru", block_bytes, block_bytes, batch,
        16384 + _N_STEPS, False, loads(0.5),
    )  # fmt: skip


def run_share(seed: int, n_configurations: int, schedule: str, profile: str) -> tuple[float, float]:
    """Price some configurations: (sum of their mean step times, the same in every run; seconds of processor time)."""
    begin = time.process_time()
    rng = np.random.default_rng(seed)
    shape, sparse, plan = ModelShape.preset("nosa-8b"), SparseConfig(), get_schedule(schedule)
    hardware = load_hardware(profile)
    situations = [
        (random_workload(rng, shape, sparse), hardware.with_h2d_gbps(float(rng.uniform(10.0, 100.0))))
        for _ in range(n_configurations)
    ]
    total = float(sum(p.step_time_us for p in price(situations, plan)))
    return total, time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configurations", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="serial")
    parser.add_argument("--hardware", default="h200")
    given = parser.parse_args()
    load, begin = os.getloadavg()[0], time.perf_counter()
    shares = [min(_AT_ONCE, given.configurations - i) for i in range(0, given.configurations, _AT_ONCE)]
    found = Parallel(n_jobs=given.workers)(
        delayed(run_share)(seed, n, given.schedule, given.hardware) for seed, n in enumerate(shares)
    )
    seconds = time.perf_counter() - begin
    print(
        json.dumps(
            {
                "configurations": given.configurations,
                "layers": 32,
                "steps": _N_STEPS,
                "workers": given.workers,
                "schedule": given.schedule,
                "hardware": given.hardware,
                "seconds": round(seconds, 2),
                "processor_seconds": round(sum(cpu for _, cpu in found), 2),
                "load_before": round(load, 2),
                "step_time_us_mean": sum(total for total, _ in found) / given.configurations,
            }
        )
    )


if __name__ == "__main__":
    main()
