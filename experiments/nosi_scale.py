"""Sizes of the NOSI experiment: the real ones for a GPU, tiny ones that run the same code on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

from nosa_sys.model_shape import ModelShape
from nosa_sys.sparse_config import SparseConfig


@dataclass(frozen=True)
class Scale:
    """Everything that the stages take their sizes from.

    ``contexts`` in tokens, the first one the default; ``batch`` for the schedules; ``full_batch``: FullAttn sequences
    whose KV bytes the others may take. ``misses`` a head and step are those of the schedules; ``nosa_misses`` and
    ``infllmv2_misses`` and the share of them that a hot buffer saves (``*_reuse``) are what SmolLM2 with the trained
    head showed at k = 32, times k / 32. Among ``misses``, at 3.4 the copies of nosa-8b take as long as
    serial computes, at 5.5 as long as two_batch does; ``means_misses`` are those for key means in the model's type.
    ``sweep_steps`` (schedules x misses), ``schedule_steps`` and ``few_steps`` keep stages short.
    """

    shape: ModelShape
    peer_shape: ModelShape
    sparse: SparseConfig
    contexts: tuple[int, ...]
    batch: int
    full_batch: int
    steps: int
    sweep_steps: int
    schedule_steps: int
    few_steps: int
    warmup: int
    schedule_warmup: int
    misses: tuple[float, ...]
    means_misses: tuple[float, ...]
    nosa_misses: float
    infllmv2_misses: float
    nosa_reuse: float
    infllmv2_reuse: float
    slot_factors: tuple[float, ...]
    n_prefetch: int
    crossover_batches: tuple[int, ...]
    peer_batches: tuple[int, ...]
    offloaded_peer_batch: int
    peer_steps: int


FULL = Scale(
    shape=ModelShape.preset("nosa-8b"),
    peer_shape=ModelShape.preset("llama-3-8b"),
    sparse=SparseConfig(),
    contexts=(16384, 65536, 98304),
    batch=64,
    full_batch=16,
    steps=256,
    sweep_steps=64,
    schedule_steps=96,
    few_steps=48,
    warmup=24,
    schedule_warmup=6,
    misses=(0.5, 2, 3.4, 4, 5.5, 8, 15),
    means_misses=(2, 3.4, 4, 5.5),
    nosa_misses=3.9,
    infllmv2_misses=7.3,
    nosa_reuse=0.77,
    infllmv2_reuse=0.65,
    slot_factors=(1.0, 1.25, 1.5, 2.0),
    n_prefetch=8,
    crossover_batches=(1, 2, 4, 8, 16, 32, 64, 128, 192),
    peer_batches=(16, 32),
    offloaded_peer_batch=4,
    peer_steps=32,
)
_TINY_SHAPE = ModelShape("tiny", 2, 4, 2, 16, 32, 64, 100, dtype="float32")
TINY = Scale(
    shape=_TINY_SHAPE,
    peer_shape=ModelShape("tiny-peer", 2, 4, 4, 16, 64, 64, 100, dtype="float32"),
    sparse=SparseConfig(
        block_size=16, kernel_size=16, kernel_stride=8, topk=8, init_blocks=1, window_size=32, select_blocks=4
    ),
    contexts=(256, 320),
    batch=4,
    full_batch=2,
    steps=4,
    sweep_steps=3,
    schedule_steps=3,
    few_steps=2,
    warmup=1,
    schedule_warmup=1,
    misses=(0.5, 2),
    means_misses=(2,),
    nosa_misses=1.0,
    infllmv2_misses=2.0,
    nosa_reuse=0.75,
    infllmv2_reuse=0.65,
    slot_factors=(1.0, 1.5),
    n_prefetch=2,
    crossover_batches=(1, 2),
    peer_batches=(2,),
    offloaded_peer_batch=1,
    peer_steps=2,
)
SCALES = {"nosa-8b": FULL, "tiny": TINY}
