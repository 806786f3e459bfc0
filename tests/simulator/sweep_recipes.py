"""A small sweep recipe, changes of it, and rows of results."""

from __future__ import annotations

import copy

import pyarrow.parquet as pq

RECIPE = {
    "name": "small",
    "base": {
        "synthetic": {
            "model_shape": "nosa-1b",
            "context": 3000,
            "steps": 6,
            "distinct_sequences": 1,
            "sparse": {"topk": 16, "window_size": 256, "select_blocks": 4},
        }
    },
    "hardware": "h200-provisional",
    "axes": {"topk": [16, 24], "slots": [1.0, "1.5x", 12], "batch": [1, 3], "h2d_gbps": [25.0, 50.0]},
}


def changed(**edits):
    """The recipe with some keys, as dotted paths, set or (None) removed."""
    data = copy.deepcopy(RECIPE)
    for path, value in edits.items():
        *parents, last = path.split("__")
        target = data
        for key in parents:
            target = target[key]
        if value is None:
            target.pop(last)
        else:
            target[last] = value
    return data


def rows_of(out):
    return pq.read_table(out / "results.parquet").to_pylist()
