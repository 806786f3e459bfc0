"""Pooled scores and betas of one captured sequence, as a locality model sees them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nosa_sys.errors import TraceError
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.playback import recorded_sets
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.reselect import CapturedBetas, CapturedScores, Describer, n_windows_of
from nosa_sys.traces.selection import pool_windows_np


@dataclass(frozen=True)
class CapturedSequence:
    """One sequence: ``position`` int64 [step]; ``scores`` float32 [step, head, block], -inf past the context;
    ``betas`` float32 [head, block] as of the last step. head = layer * KV heads + KV head."""

    n_layers: int
    n_kv_heads: int
    sparse: SparseConfig
    position: np.ndarray
    scores: np.ndarray
    betas: np.ndarray


def captured_sequences(trace: Trace, block_size: int) -> Iterator[CapturedSequence]:
    """Every sequence of a trace, its captured windows pooled to blocks of ``block_size`` tokens.

    TraceError where scores or betas are missing or a step lacks a head; ConfigError for a block size that the
    captured windows do not make.
    """
    meta, rows = trace.meta, trace.selections
    sparse = meta.sparse.with_block_size(block_size)
    n_heads = meta.model.n_layers * meta.model.n_kv_heads
    for sequence in recorded_sets(trace):  # refuses gaps
        own = rows.take(rows.sequence == sequence.sequence)
        own = own.take(np.lexsort((own.kv_head, own.layer, own.position)))
        if not len(own):
            raise TraceError(f"{trace.directory}: sequence {sequence.sequence} has no step")
        scores, betas, describe = CapturedScores(trace, own), CapturedBetas(trace, own, sparse), Describer(own)
        n_blocks = int(sequence.position[-1]) // block_size + 1
        pooled = np.empty((len(sequence.position), n_heads, n_blocks), dtype=np.float32)
        for step in range(len(pooled)):
            chosen = np.arange(step * n_heads, (step + 1) * n_heads)
            n_windows = n_windows_of(own.position[chosen], sparse)
            pooled[step] = pool_windows_np(scores.windows(chosen, n_windows, describe), n_windows, n_blocks, sparse)
        last = betas.windows(chosen, n_windows, describe)
        yield CapturedSequence(
            meta.model.n_layers,
            meta.model.n_kv_heads,
            sparse,
            sequence.position,
            pooled,
            pool_windows_np(last, n_windows, n_blocks, sparse),
        )
