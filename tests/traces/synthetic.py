"""Valid traces from an independent model in plain Python: sorted() selects, lists and dictionaries hold the slots.

Nothing here calls the code under test but the schema, so that check and replay are judged by other code.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nosa_sys.model_shape import ModelShape
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.schema import SCHEMAS

SMALL = SparseConfig(
    block_size=4, kernel_size=4, kernel_stride=2, topk=8, init_blocks=1, window_size=8, select_blocks=3
)


@dataclass
class SyntheticTrace:
    """``meta`` as JSON, ``tables`` as lists of row dicts: easy to change one field and write again."""

    meta: dict[str, Any]
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def write(self, directory: Path, rows_per_part: int = 10**6) -> Path:
        """Write with plain pyarrow, not with TraceWriter."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "meta.json").write_text(json.dumps(self.meta))
        for name, rows in self.tables.items():
            (directory / name).mkdir(exist_ok=True)
            for part, begin in enumerate(range(0, max(1, len(rows)), rows_per_part)):
                table = pa.Table.from_pylist(rows[begin : begin + rows_per_part], schema=SCHEMAS[name])
                pq.write_table(table, directory / name / f"part-{part:05d}.parquet")
        return directory

    def rows(self, **keys: int) -> list[dict[str, Any]]:
        """Selection rows with these key values."""
        return [r for r in self.tables["selections"] if all(r[k] == v for k, v in keys.items())]


def forced_blocks(current: int, cfg: SparseConfig) -> set[int]:
    sinks = set(range(min(cfg.init_blocks, current + 1)))
    return sinks | set(range(max(0, current - cfg.local_blocks), current + 1))


def pooled(windows: list[float], n_windows: int, block: int, cfg: SparseConfig) -> float:
    ratio = cfg.block_size // cfg.kernel_stride
    seen = [windows[i] for i in range(ratio * block - 1, ratio * block + ratio) if 0 <= i < n_windows]
    return max(seen, default=float("-inf"))


def n_windows_at(position: int, cfg: SparseConfig) -> int:
    length = position + 1
    return 0 if length < cfg.kernel_size else (length - cfg.kernel_size) // cfg.kernel_stride + 1


def select(position: int, scores: list[float], betas: list[float], cfg: SparseConfig, method: str) -> dict[int, int]:
    """Block id -> origin number, by the definition: F, best a by score, best m by beta, ties to the lower index."""
    current = position // cfg.block_size
    blocks = range(current + 1)
    if method == "full" or current + 1 <= cfg.topk:
        return dict.fromkeys(blocks, 4)
    n_windows = n_windows_at(position, cfg)
    forced = forced_blocks(current, cfg)
    k_q = {
        "nosa": cfg.init_blocks + cfg.local_blocks + cfg.select_blocks,
        "infllmv2": cfg.topk,
        "dma": cfg.init_blocks + cfg.local_blocks,
    }[method]
    n_query = max(0, k_q - len(forced))
    candidates = [b for b in blocks if b not in forced]
    by_score = sorted(candidates, key=lambda b: (-pooled(scores, n_windows, b, cfg), b))[:n_query]
    rest = [b for b in candidates if b not in by_score]
    n_fill = cfg.topk - len(forced) - n_query
    by_beta = sorted(rest, key=lambda b: (-pooled(betas, n_windows, b, cfg), b))[:n_fill]
    out = {b: 0 if b < cfg.init_blocks else 1 for b in forced}
    out.update(dict.fromkeys(by_score, 2))
    out.update(dict.fromkeys(by_beta, 3))
    return out


class DictSlots:
    """Slot cache of one stream: a list of slots and a dictionary of last uses."""

    def __init__(self, slots: int, policy: str, position: int, block_size: int) -> None:
        self.slots: list[int | None] = [None] * slots
        self.policy = policy
        self.last_use: dict[int, int] = {}
        if position % block_size:
            self.slots[0] = position // block_size

    def serve(self, wanted: list[int], current: int, now: int, beta: dict[int, float]) -> int:
        missing = [b for b in sorted(wanted) if b not in self.slots]
        if self.policy == "exact":
            self.slots = [b if b in wanted else None for b in self.slots]
        free = [i for i, b in enumerate(self.slots) if b is None]

        def rank(slot: int) -> tuple[float, int]:
            block = self.slots[slot]
            assert block is not None
            return (self.last_use.get(block, -1) if self.policy == "lru" else beta[block], slot)

        victims = [i for i, b in enumerate(self.slots) if b is not None and b not in wanted]
        free += sorted(victims, key=rank)
        for block, slot in zip(missing, free, strict=False):
            self.slots[slot] = block
        for block in wanted:
            self.last_use[block] = now
        assert all(b in self.slots for b in wanted)
        return sum(b != current for b in missing)


def make_trace(
    *,
    cfg: SparseConfig = SMALL,
    method: str = "nosa",
    n_layers: int = 2,
    n_kv_heads: int = 2,
    sequences: tuple[tuple[int, int, int], ...] = ((37, 9, 0), (5, 6, 2)),
    slots: int | None = None,
    policy: str = "exact",
    seed: int = 0,
    scores: bool = True,
    levels: int | None = None,
    host_kv_dtype: str = "float32",
    in_id_order: bool = False,
) -> SyntheticTrace:
    """A whole valid trace.

    ``sequences``: (prompt tokens, new tokens, step at which it joins). ``levels``: quantise scores and betas to
    that many values, so that ties abound. ``in_id_order``: seat the cold row's blocks in ascending id, the partial
    current block included. Without ``scores`` the optional tables are left out.
    """
    rng = random.Random(seed)
    slots = cfg.topk if slots is None else slots
    shape = ModelShape("toy", n_layers, 2 * n_kv_heads, n_kv_heads, 8, 32, 64, 100, dtype="float32")
    element = {"float32": 4, "bfloat16": 2}[host_kv_dtype]
    block_bytes = 2 * cfg.block_size * 8 * element

    def draw() -> float:
        value = rng.random() if levels is None else rng.randrange(levels) / levels
        return float(pa.scalar(value, pa.float32()).as_py())

    tables: dict[str, list[dict[str, Any]]] = {name: [] for name in ("selections", "steps", "prefill")}
    if scores:
        tables.update(scores=[], betas=[])
    betas: dict[tuple[int, int, int], list[float]] = {}
    caches: dict[tuple[int, int, int], DictSlots] = {}
    previous: dict[tuple[int, int, int], set[int]] = {}
    heads = [(layer, head) for layer in range(n_layers) for head in range(n_kv_heads)]
    for number, (prompt, new, _) in enumerate(sequences):
        windows = n_windows_at(prompt + new - 2, cfg)
        for layer, head in heads:
            betas[number, layer, head] = [draw() for _ in range(windows)]
            if scores:
                tables["betas"] += [
                    {"sequence": number, "layer": layer, "kv_head": head, "window": w, "beta_mean": b}
                    for w, b in enumerate(betas[number, layer, head])
                ]
        for layer in range(n_layers):
            finished = 0 if method == "full" else (prompt - 1) // cfg.block_size * n_kv_heads * block_bytes
            tables["prefill"].append(
                {
                    "sequence": number,
                    "layer": layer,
                    "n_tokens": prompt - 1,
                    "h2d_bytes": 0,
                    "d2h_bytes": finished,
                    "time_us": None,
                }
            )
    n_steps = max(join + new for _, new, join in sequences)
    for step in range(n_steps):
        layer_sums = {layer: {"n_misses": 0, "d2h_bytes": 0} for layer in range(n_layers)}
        active = [(i, p + step - j) for i, (p, n, j) in enumerate(sequences) if j <= step < j + n]
        for number, after in active:
            position = after - 1
            current = position // cfg.block_size
            cold = position == sequences[number][0] - 1
            for layer, head in heads:
                key = (number, layer, head)
                n_windows = n_windows_at(position, cfg)
                window_scores = [draw() for _ in range(n_windows)]
                chosen = select(position, window_scores, betas[key], cfg, method)
                ids = sorted(chosen)
                if cold:
                    begin = 0 if in_id_order else position
                    caches[key] = DictSlots(slots, policy, begin, cfg.block_size)
                pooled_beta = {b: pooled(betas[key], n_windows, b, cfg) for b in range(current + 1)}
                misses = 0 if method == "full" else caches[key].serve(ids, current, step, pooled_beta)
                gamma = None if cold else len(previous[key] & set(ids)) / len(ids)
                previous[key] = set(ids)
                tables["selections"].append(
                    {
                        "step": step,
                        "position": position,
                        "sequence": number,
                        "layer": layer,
                        "kv_head": head,
                        "block_ids": ids,
                        "origins": [chosen[b] for b in ids],
                        "n_misses": misses,
                        "h2d_bytes": misses * block_bytes,
                        "gamma": gamma,
                        "cold": cold,
                    }
                )
                if scores:
                    tables["scores"].append(
                        {
                            "step": step,
                            "sequence": number,
                            "layer": layer,
                            "kv_head": head,
                            "window_scores": window_scores,
                        }
                    )
                layer_sums[layer]["n_misses"] += misses
                if method != "full" and (position + 1) % cfg.block_size == 0:
                    layer_sums[layer]["d2h_bytes"] += block_bytes
        for layer in range(-1, n_layers):
            part = layer_sums.values() if layer < 0 else [layer_sums[layer]]
            misses = sum(s["n_misses"] for s in part)
            tables["steps"].append(
                {
                    "step": step,
                    "layer": layer,
                    "n_sequences": len(active),
                    "n_misses": misses,
                    "h2d_bytes": misses * block_bytes,
                    "d2h_bytes": sum(s["d2h_bytes"] for s in part),
                    "prefetch_bytes": 0,
                    "wasted_prefetch_bytes": 0,
                    "time_us": 10.0 + step,
                    "select_us": None,
                    "h2d_us": None,
                    "attention_us": None,
                    "other_us": None,
                }
            )
    meta = {
        "schema_version": 1,
        "complete": True,
        "n_steps": n_steps,
        "model": shape.to_dict(),
        "sparse": cfg.to_dict(),
        "method": method,
        "head": "ed_dma",
        "schedule": "serial",
        "slots": slots,
        "policy": policy,
        "kv_dtype": "float32",
        "host_kv_dtype": host_kv_dtype,
        "sequences": [
            {"id": i, "prompt_tokens": p, "prompt_sha256": "", "new_tokens": n} for i, (p, n, _) in enumerate(sequences)
        ],
        "status": "measured",
        "seed": seed,
    }
    return SyntheticTrace(meta, tables)
