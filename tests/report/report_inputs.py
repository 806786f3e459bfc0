"""Directories for report tests, made by hand: a small trace with every table, replays, a prediction and a sweep."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd

from nosa_sys.model_shape import ModelShape
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.schema import SequenceInfo, TraceMeta
from nosa_sys.traces.writer import TraceWriter

SPARSE = SparseConfig(topk=8, init_blocks=1, window_size=128, select_blocks=3)
N_LAYERS, N_HEADS, N_STEPS = 4, 2, 30


def write_trace(directory: Path, *, name: str = "tiny", device: str = "a test device", times: bool = True) -> Path:
    """Thirty steps of one sequence; the first is cold, gamma varies between floor and 1, layer 3 has no gamma."""
    shape = ModelShape(name, N_LAYERS, 4, N_HEADS, 16, 64, 128, 256, dtype="float32")
    meta = TraceMeta(
        model=shape,
        sparse=SPARSE,
        slots=8,
        device=device,
        versions={"nosa-sys": "0"},
        sequences=(SequenceInfo(0, 2000, "", N_STEPS),),
        n_steps=N_STEPS,
    )
    rng = np.random.default_rng(1)
    with TraceWriter(directory, meta, overwrite=True) as writer:
        for step in range(N_STEPS):
            cells = [(layer, head) for layer in range(N_LAYERS) for head in range(N_HEADS)]
            misses = rng.integers(0, 3, len(cells)) if step else np.full(len(cells), 7)
            ids = [np.sort(rng.choice(30, 8, replace=False)).astype(np.int32) for _ in cells]
            gamma = [
                None if step == 0 or layer == 3 else 1 - m / 8 for (layer, _), m in zip(cells, misses, strict=True)
            ]
            writer.add(
                "selections",
                {
                    "step": [step] * len(cells),
                    "position": [1999 + step] * len(cells),
                    "sequence": [0] * len(cells),
                    "layer": [c[0] for c in cells],
                    "kv_head": [c[1] for c in cells],
                    "block_ids": ids,
                    "origins": [np.array([0, 1, 1, 1, 2, 2, 3, 3], np.int8) for _ in cells],
                    "n_misses": misses,
                    "h2d_bytes": misses * meta.block_bytes,
                    "gamma": gamma,
                    "cold": [step == 0] * len(cells),
                },
            )
            for layer in range(-1, N_LAYERS):
                share = 1.0 if layer == -1 else 1 / N_LAYERS
                us = [400.0 * share if times else None]
                writer.add(
                    "steps",
                    {
                        "step": [step],
                        "layer": [layer],
                        "n_sequences": [1],
                        "n_misses": [int(sum(misses) * share)],
                        "h2d_bytes": [0],
                        "d2h_bytes": [0],
                        "prefetch_bytes": [0],
                        "wasted_prefetch_bytes": [0],
                        "time_us": us,
                        "select_us": us,
                        "h2d_us": us,
                        "attention_us": us,
                        "other_us": us,
                    },
                )
    return directory


def write_replay(directory: Path, *, slots: int, policy: str, misses: float | None, method: str = "nosa") -> Path:
    directory.mkdir(parents=True)
    document = {
        "kind": "replay",
        "status": "measured",
        "trace": "trace",
        "sparse": SPARSE.to_dict(),
        "method": method,
        "slots": slots,
        "slots_over_k": slots / 8,
        "policy": policy,
        "misses_per_head_step": misses,
        "miss_ratio": None if misses is None else misses / 8,
        "gamma_macro": 0.8,
        "h2d_bytes_per_step": 1e6 if misses is None else misses * 1e6,
        "assumptions": ["queries unchanged"],
    }
    (directory / "replay.json").write_text(json.dumps(document))
    return directory


def prediction(batch: int, slots: int, gbps: float) -> dict[str, object]:
    """Sizes that behave: exposed transfer grows with the batch and shrinks with slots and bandwidth."""
    h2d = batch * 400.0 * 8 / slots / gbps * 50
    parts = {"select_us": 300.0, "h2d_exposed_us": h2d, "attention_us": 10.0 * batch, "gemm_us": 4000.0}
    step = sum(parts.values()) + 1000.0
    return {
        **parts,
        "host_overhead_us": 1000.0,
        "d2h_exposed_us": 0.0,
        "step_time_us": step,
        "tokens_per_s": batch / step * 1e6,
        "tokens_per_s_per_sequence": 1e6 / step,
        "link_utilisation": h2d / step,
        "limited_by": "h2d" if h2d > 4000 else "gemm",
        "status": "projected",
    }


def write_sweep(directory: Path, *, hole: bool = False) -> Path:
    """model x slots x bandwidth x batch; ``hole`` makes one result missing."""
    rows = [
        {
            "model_shape": model,
            "hardware": "h200-provisional",
            "method": "nosa",
            "topk": 8,
            "slots": slots,
            "policy": "exact" if slots == 8 else "lru",
            "h2d_gbps": gbps,
            "context_tokens": 4096,
            "batch": batch,
            **prediction(batch, slots, gbps),
        }
        for model in ("tiny", "nosa-8b")
        for slots in (8, 12)
        for gbps in (50.0, 100.0)
        for batch in (1, 8, 64)
    ]
    frame = pd.DataFrame(rows)
    if hole:
        frame.loc[1, "tokens_per_s"] = np.nan
    directory.mkdir(parents=True)
    frame.to_parquet(directory / "results.parquet")
    (directory / "summary.json").write_text(json.dumps({"n_configurations": len(rows), "seed": 0}))
    return directory


def write_everything(root: Path, *, hole: bool = False) -> Path:
    """A directory like the demo's: trace, replays, prediction, sweep."""
    write_trace(root / "trace")
    for slots, policy, misses in (
        (8, "exact", 1.0),
        (12, "lru", 0.3),
        (16, "lru", None if hole else 0.1),
        (12, "belady", 0.2),
    ):
        write_replay(root / "replays" / f"{policy}-{slots}", slots=slots, policy=policy, misses=misses)
    write_replay(root / "replays" / "infllmv2", slots=8, policy="exact", misses=2.0, method="infllmv2")
    (root / "prediction").mkdir()
    document = {"kind": "prediction", **prediction(8, 8, 50.0), "settings": {"model_shape": "tiny", "batch": 8}}
    (root / "prediction" / "prediction.json").write_text(json.dumps(document))
    write_sweep(root / "sweep", hole=hole)
    return root
