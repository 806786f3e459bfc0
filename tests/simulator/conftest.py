"""Builders of small inputs whose right answers are known by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from nosa_sys.model_shape import ModelShape
from nosa_sys.simulator.rates import LinkSharing
from nosa_sys.simulator.step_times import AttentionSplit, Speculation, StepCosts
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.miss_table import MissTable
from nosa_sys.traces.schema import SequenceInfo, TraceMeta
from nosa_sys.traces.writer import TraceWriter


@pytest.fixture
def tiny_shape():
    """2 layers, 2 KV heads, D 128, bf16: a missed block of 64 tokens moves 32,768 bytes."""
    return ModelShape("tiny", 2, 4, 2, 128, 256, 512, 1000)


@pytest.fixture
def make_table():
    """misses [sequence, step, layer, head] -> MissTable with positions from ``start`` on and step 0 cold."""

    def build(misses, start=100, cold=True, block_bytes=32768, n_selected=4, method="nosa"):
        misses = np.asarray(misses)
        n_sequences, _, layers, heads = misses.shape
        ordered = misses.transpose(1, 0, 2, 3)
        index = np.indices(ordered.shape).reshape(4, -1)
        starts = np.broadcast_to(np.asarray(start), n_sequences)
        return MissTable(
            step=index[0].astype(np.int32),
            position=(starts[index[1]] + index[0]).astype(np.int32),
            sequence=index[1].astype(np.int32),
            layer=index[2].astype(np.int16),
            kv_head=index[3].astype(np.int16),
            n_selected=np.full(index.shape[1], n_selected, dtype=np.int32),
            n_misses=ordered.reshape(-1).astype(np.int32),
            cold=(index[0] == 0) & cold,
            block_bytes=block_bytes,
            block_size=64,
            n_layers=layers,
            n_kv_heads=heads,
            method=method,
        )

    return build


@pytest.fixture
def random_costs():
    """rng, n, layers -> StepCosts of every schedule, with idle parts, zero durations and shared rates of every kind."""

    def build(rng, n, layers, duplex=None, beside=None, compute=None):
        duplex = rng.uniform(0.5, 1.0) if duplex is None else duplex
        beside = rng.uniform(duplex, 1.0) if beside is None else beside
        compute = rng.uniform(0.5, 1.0) if compute is None else compute
        sharing = LinkSharing(duplex, beside, compute)

        def durations(share_of_zeros):
            values = rng.exponential(10.0 ** rng.uniform(-1, 3), (n, layers))
            values[rng.random((n, layers)) < share_of_zeros] = 0.0
            return values

        def costs_of_rows():
            fetch, write = durations(0.3), durations(0.4)
            return StepCosts(
                host_us=durations(0.2),
                select_us=durations(0.2),
                h2d_fixed_us=np.where(fetch > 0, rng.exponential(3.0), 0.0),
                h2d_us=fetch,
                attention_us=durations(0.1),
                gemm_us=durations(0.1),
                d2h_fixed_us=np.where(write > 0, rng.exponential(6.0), 0.0),
                d2h_us=write,
                step_host_us=rng.exponential(10.0, n),
                tail_us=rng.exponential(10.0, n),
                h2d_bytes=(fetch * 1000).astype(np.int64),
                d2h_bytes=(write * 1000).astype(np.int64),
                sharing=sharing,
            )

        guess = durations(0.3)
        return dataclasses.replace(
            costs_of_rows(),
            attention_split=AttentionSplit(durations(0.2), durations(0.2)),
            speculation=Speculation(
                np.where(guess > 0, rng.exponential(3.0), 0.0),
                guess,
                (guess * 1000).astype(np.int64),
                np.zeros((n, layers), dtype=np.int64),
            ),
            halves=(costs_of_rows(), costs_of_rows()),
        )

    return build


@pytest.fixture
def write_trace():
    """directory, step plan -> a real trace on disk: selections by hand, misses by a dictionary model of slots = k."""

    def build(directory: Path, steps=12, n_sequences=2, seed=0, new_dtype="float32"):
        rng = np.random.default_rng(seed)
        shape = ModelShape("traced", 2, 4, 2, 16, 64, 128, 100, dtype="float32")
        sparse = SparseConfig(block_size=16, topk=6, init_blocks=1, window_size=32, select_blocks=1)
        meta = TraceMeta(
            model=shape,
            sparse=sparse,
            slots=sparse.topk,
            kv_dtype=new_dtype,
            host_kv_dtype=new_dtype,
            sequences=tuple(SequenceInfo(i, 200, "", steps) for i in range(n_sequences)),
        )
        block_bytes, total = meta.block_bytes, 0
        with TraceWriter(directory, meta) as writer:
            resident: dict[tuple[int, int, int], set[int]] = {}
            for step in range(steps):
                position = 199 + step
                current = position // 16
                filled = (position + 1) % 16 == 0
                layer_misses = np.zeros(shape.n_layers, dtype=np.int64)
                for sequence in range(n_sequences):
                    for layer in range(shape.n_layers):
                        for head in range(shape.n_kv_heads):
                            forced = {0, current - 2, current - 1, current}
                            free = rng.choice(np.arange(1, current - 2), size=2, replace=False)
                            chosen = sorted(forced | {int(b) for b in free})
                            before = resident.get((sequence, layer, head), {current} if step == 0 else set())
                            misses = len(set(chosen) - before - {current})
                            resident[sequence, layer, head] = set(chosen)
                            layer_misses[layer] += misses
                            total += misses * block_bytes
                            origins = [0 if b == 0 else 1 if b >= current - 2 else 2 for b in chosen]
                            writer.add(
                                "selections",
                                {
                                    "step": [step],
                                    "position": [position],
                                    "sequence": [sequence],
                                    "layer": [layer],
                                    "kv_head": [head],
                                    "block_ids": [np.array(chosen, dtype=np.int32)],
                                    "origins": [np.array(origins, dtype=np.int8)],
                                    "n_misses": [misses],
                                    "h2d_bytes": [misses * block_bytes],
                                    "gamma": [None if step == 0 else len(set(chosen) & before) / len(chosen)],
                                    "cold": [step == 0],
                                },
                            )
                written = n_sequences * shape.n_kv_heads * block_bytes * int(filled)
                for layer in (-1, *range(shape.n_layers)):
                    misses = int(layer_misses.sum() if layer < 0 else layer_misses[layer])
                    writer.add(
                        "steps",
                        {
                            "step": [step],
                            "layer": [layer],
                            "n_sequences": [n_sequences],
                            "n_misses": [misses],
                            "h2d_bytes": [misses * block_bytes],
                            "d2h_bytes": [written * (shape.n_layers if layer < 0 else 1)],
                            "prefetch_bytes": [0],
                            "wasted_prefetch_bytes": [0],
                            "time_us": [None],
                            "select_us": [None],
                            "h2d_us": [None],
                            "attention_us": [None],
                            "other_us": [None],
                        },
                    )
            writer.close(n_steps=steps)
        return dataclasses.replace(meta, n_steps=steps), total

    return build
