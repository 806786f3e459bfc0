"""One trace replayed under other budgets: the k_e share, the block size, the method; gamma and misses of each.

    python -m nosa_sys.experiments.budget_replays --trace out/demo/trace --out experiments/results/cpu/budgets

The trace (here that of ``make demo``) needs scores; the results page prices the misses of budgets.json. Loads no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nosa_sys.errors import NosaError
from nosa_sys.experiments.replays import ReplayRequest, replay_document
from nosa_sys.methods import get_method
from nosa_sys.outputs import write_whole
from nosa_sys.report.inputs import CAPTURE_FILE, read_json
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.reader import Trace

BUDGETS_FILE = "budgets.json"
TOPK_FACTORS = (1, 2)
BLOCK_SIZES = (16, 32, 64, 128, 256)
_KEPT = (
    *("method", "slots_over_k", "policy", "status", "n_rows", "misses_per_head_step", "miss_ratio"),
    *("gamma_macro", "guaranteed_gamma", "h2d_bytes_per_step", "assumptions"),
)


def plan(own: SparseConfig) -> Iterator[tuple[str, SparseConfig, str]]:
    """(axis, budgets, method): every k_e that a query-aware pick is left beside, block sizes of equal token budgets."""
    for factor in TOPK_FACTORS:
        sparse = own.with_topk(own.topk * factor)
        most = sparse.topk - sparse.init_blocks - sparse.local_blocks
        for select in sorted({1, *range(factor, most + 1, factor)}):
            yield "k_e", sparse.with_k_e(sparse.topk - select), "nosa"
        yield "k_e", sparse, "infllmv2"
    for size in BLOCK_SIZES:
        for method in ("nosa", "infllmv2"):
            if own.topk_tokens % size == own.window_size % size == own.select_blocks * own.block_size % size == 0:
                yield "block_size", own.with_block_size(size), method


def replay_budgets(trace: Trace) -> list[dict[str, Any]]:
    """A row a replay at slots = k; ``skipped`` says why a budget that the trace cannot serve has none."""
    rows = []
    for axis, sparse, method in plan(trace.meta.sparse):
        row: dict[str, Any] = {"axis": axis, **sparse.to_dict(), "k_e": sparse.k_e, "method": method, "skipped": None}
        try:
            get_method(method).check(sparse)
            document = replay_document(ReplayRequest(trace.directory, sparse, method, sparse.topk, "exact"), trace)
            row |= {key: document[key] for key in _KEPT}
        except NosaError as error:
            row["skipped"] = str(error)
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Status 0, or 2 for a trace that cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    try:
        trace = Trace.open(options.trace)
        rows = replay_budgets(trace)
        capture = options.trace / CAPTURE_FILE
        document = {
            "kind": "budget replays",
            "facts": {
                "device": trace.meta.device,
                "versions": trace.meta.versions,
                "git_revision": trace.meta.git_revision,
                "command": f"python -m nosa_sys.experiments.budget_replays --trace {options.trace} --out {options.out}",
                "capture": read_json(capture).get("command", "") if capture.is_file() else "",
                "model": trace.meta.model.to_dict(),
            },
            "context_tokens": max(s.prompt_tokens + s.new_tokens for s in trace.meta.sequences),
            "sparse": trace.meta.sparse.to_dict(),
            "rows": rows,
        }
        options.out.mkdir(parents=True, exist_ok=True)
        write_whole(options.out / BUDGETS_FILE, json.dumps(document, indent=1, allow_nan=False) + "\n", overwrite=True)
    except NosaError as error:
        print(error, file=sys.stderr)
        return 2
    for row in rows:
        head = f"{row['axis']} {row['method']} k {row['topk']} k_e {row['k_e']} block {row['block_size']}"
        found = row["skipped"] or f"{row['misses_per_head_step']:.3f} misses, gamma {row['gamma_macro']:.3f}"
        print(f"{head}  {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
