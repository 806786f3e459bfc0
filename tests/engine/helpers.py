"""Small models, random prompts, and a watcher that notes every row an engine decodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from nosa_sys.engine.engine import Engine
from nosa_sys.model_shape import ModelShape
from nosa_sys.models.llama import LlamaModel
from nosa_sys.models.random import random_model
from nosa_sys.sparse_config import SparseConfig

VOCAB = 64
TINY = ModelShape("tiny", 2, 4, 2, 8, 24, 40, VOCAB, dtype="float64")
# 16-token blocks, k = 5: 3 forced, 1 query-aware, 1 by beta; sparse from 81 tokens on
SMALL = SparseConfig(
    block_size=16, kernel_size=16, kernel_stride=8, topk=5, init_blocks=1, window_size=16, select_blocks=2
)
METHODS = ("nosa", "infllmv2", "dma", "full")
NAN = math.nan


def tiny_model(seed: int = 0, *, head: str = "ed_dma", dtype: str = "float64", shape: ModelShape = TINY) -> LlamaModel:
    return random_model(shape, seed, dtype, head=head)


def random_tokens(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, n).tolist()


@dataclass
class Row:
    """One decoded row: the position consumed, its logits, ``selected[layer][head]`` and ``misses[layer][head]``."""

    step: int
    position: int
    cold: bool
    logits: np.ndarray
    selected: list[list[list[int]]]
    misses: list[list[int]]


@dataclass
class Watch:
    """Steps an engine and keeps each sequence's rows, in order."""

    engine: Engine
    rows: dict[int, list[Row]] = field(default_factory=dict)

    def step(self) -> None:
        if not self.engine.step():
            return
        plan, logits = self.engine.last_plan, self.engine.last_logits
        batch, misses = plan.batch, plan.n_misses.tolist()
        ids = plan.block_ids.tolist()
        for b, sequence in enumerate(batch.sequences):
            self.rows.setdefault(sequence, []).append(
                Row(
                    batch.step,
                    batch.positions[b],
                    batch.cold[b],
                    logits[b].double().numpy(),
                    [[[j for j in head if j >= 0] for head in layer[b]] for layer in ids],
                    [layer[b] for layer in misses],
                )
            )

    def run(self) -> dict[int, list[Row]]:
        while not self.engine.idle:
            self.step()
        return self.rows
