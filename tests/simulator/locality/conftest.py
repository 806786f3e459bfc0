"""Small score processes and the captures they stand for."""

from __future__ import annotations

import numpy as np
import pytest

from nosa_sys.simulator.locality.captured import CapturedSequence
from nosa_sys.simulator.locality.fit import draw_scores
from nosa_sys.simulator.locality.process import N_WEIGHTS, ScoreProcess
from nosa_sys.sparse_config import SparseConfig

SPARSE = SparseConfig(topk=32, init_blocks=1, window_size=512, select_blocks=8)


@pytest.fixture
def make_process():
    """Every head alike but for what is given; heads = n_layers x n_kv_heads."""

    def build(
        n_layers=2,
        n_kv_heads=2,
        weights=(0.2, 0.1, 0.0, 0.2, 0.0, 0.5),
        recency=0.0,
        beta=0.0,
        wildness=0.0,
        by_all=0.0,
        by_layer=0.0,
    ):
        n = n_layers * n_kv_heads
        return ScoreProcess(
            n_layers,
            n_kv_heads,
            np.broadcast_to(np.asarray(weights, dtype=float), (n, N_WEIGHTS)).copy(),
            np.full(n, float(recency)),
            np.full(n, float(beta)),
            np.full(n, float(wildness)),
            by_all,
            by_layer,
        )

    return build


@pytest.fixture
def make_capture():
    """What a capture would hold if a process were the truth."""

    def build(process, context=7000, steps=300, seed=0, sparse=SPARSE):
        position = context - 1 + np.arange(steps, dtype=np.int64)
        scores, betas = draw_scores(process, position, sparse, np.random.default_rng([seed, 77]))
        return CapturedSequence(process.n_layers, process.n_kv_heads, sparse, position, scores, betas)

    return build
