"""Speed of sweeps that select again from captured scores: configurations a minute on a trace, each a selection anew.

Run: python -m nosa_sys.simulator.bench_reselect --trace DIR --workers 2     (a trace captured with --scores)
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from typing import Any

from nosa_sys.errors import ConfigError
from nosa_sys.simulator.recipe import parse_recipe
from nosa_sys.simulator.sweep import sweep
from nosa_sys.traces.reader import Trace


def recipe_of(trace: Trace, n_configurations: int) -> dict[str, Any]:
    """Budgets (k, k_q and the method) that the trace was not captured with, up to so many."""
    sparse = trace.meta.sparse
    most = sparse.topk - sparse.init_blocks - sparse.local_blocks
    counts = [q for q in range(1, most + 1) if q != sparse.select_blocks]
    factors = -(-n_configurations // max(1, 2 * len(counts)))
    topks = [sparse.topk + i for i in range(1, factors + 1)]
    return {
        "name": "reselect",
        "base": {"trace": str(trace.directory)},
        "hardware": "h200",
        "extrapolate": True,
        "axes": {"method": ["nosa", "infllmv2"], "topk": topks, "select_blocks": counts},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--configurations", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    trace = Trace.open(given.trace)
    if not trace.has("scores"):
        raise ConfigError(f"trace {given.trace} carries no scores; capture it with --scores")
    recipe = parse_recipe(recipe_of(trace, given.configurations))
    load, begin, processor = os.getloadavg()[0], time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as out:
        summary = sweep(recipe, out, workers=given.workers).summary
    seconds = time.perf_counter() - begin
    priced = summary["n_configurations"] - summary["n_refused"]
    model = trace.meta.model
    document = {
        "configurations": priced,
        "refused": summary["n_refused"],
        "layers": model.n_layers,
        "kv_heads": model.n_kv_heads,
        "steps": trace.meta.n_steps,
        "rows": len(trace.selections),
        "prompt_tokens": [s.prompt_tokens for s in trace.meta.sequences],
        "workers": given.workers,
        "seconds": round(seconds, 2),
        # of this process: with one worker all there is
        "processor_seconds": round(time.process_time() - processor, 2) if given.workers == 1 else None,
        "configurations_a_minute": round(60 * priced / seconds, 1),
        "load_before": round(load, 2),
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
