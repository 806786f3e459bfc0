"""Costs of a step of the CUDA engine: the terms of `simulator.engine_terms` times the sizes that they grow with.

Calibration fits the terms to the same sizes, so that the two cannot drift apart. Differences from the kernels' own
model: a launch costs its fixed part also where it finds nothing to do (the graph holds it all the same), fetches in
line and beside compute are two paths, matrices are interpolated in a table, and a step has a frame (embedding, output
head, sampling, results, the gap between graphs).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nosa_sys.errors import HardwareError
from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.simulator.cost_model import KEY_MEAN_BYTES, PARTIAL_BYTES, CostModel
from nosa_sys.simulator.engine_terms import EngineTerms
from nosa_sys.simulator.invariants import require
from nosa_sys.simulator.step_times import AttentionSplit, Floats, Ints, Speculation, StepCosts
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.miss_table import LayerStepMisses
from nosa_sys.work_splits import choose_splits, padded, tile_units

MB = 1e6
# Two blocks below this many tokens share a tile of the attention kernel, which then reads scattered rows.
FULL_BLOCK_TOKENS = 64
_TILE_TOKENS = 64  # of the attention kernel in 16-bit types
_LOGIT_BYTES = 8  # a logit of a window is written and read as fp32
# Reads and writes of the hidden state beside the matrices of a layer: two residual norms, and their gate and up.
_HIDDEN_PASSES, _MLP_PASSES = 8, 3


def layer_matrices(shape: ModelShape) -> tuple[tuple[int, int], ...]:
    """(output, input features) of a layer's products: q, k and v fused, output projection, gate and up fused, down."""
    attention = shape.n_q_heads * shape.head_dim
    return (
        (attention + 2 * shape.n_kv_heads * shape.head_dim, shape.hidden_size),
        (shape.hidden_size, attention),
        (2 * shape.intermediate_size, shape.hidden_size),
        (shape.hidden_size, shape.intermediate_size),
    )


def head_matrix(shape: ModelShape) -> tuple[int, int]:
    """(output, input features) of the output head."""
    return shape.vocab_size, shape.hidden_size


def untimed_matrices(shape: ModelShape, terms: EngineTerms) -> list[str]:
    """Products of a step, as "output x input features", that the profile has no times of: the roofline prices them."""
    products = dict.fromkeys((*layer_matrices(shape), head_matrix(shape)))
    return [f"{n} x {k}" for n, k in products if terms.matrix(n, k) is None]


def select_features(
    shape: ModelShape, sparse: SparseConfig, method: str, slots: int, n_rows: np.ndarray, context_tokens: np.ndarray
) -> Floats:
    """Sizes of a layer's selection [step, 5]: whether blocks are scored, (row, KV head) pairs, blocks of one row,
    thousands of comparisons of selected blocks with slots, megabytes.

    The slot plan compares every selected block with every slot, both filled up to a power of two. Megabytes: key means
    and beta means read, logits written and read; what a method does not use it does not read.
    """
    variant = get_method(method)
    n_rows = np.asarray(n_rows, dtype=np.float64)
    windows = np.asarray(context_tokens, dtype=np.float64) / sparse.kernel_stride
    scores = variant.query_aware_picks(sparse, sparse.n_forced) > 0
    per_window = shape.n_kv_heads * KEY_MEAN_BYTES * (shape.head_dim * scores + variant.uses_beta)
    per_window += shape.n_q_heads * _LOGIT_BYTES * scores
    blocks = context_tokens / sparse.block_size / np.maximum(n_rows, 1)
    compared = float(padded(sparse.topk) * padded(slots)) / 1e3
    ones = np.ones_like(n_rows)
    sizes = [ones * scores, n_rows * shape.n_kv_heads, blocks, ones * compared, windows * per_window / MB]
    return np.stack(sizes, axis=-1)


def attention_features(attended_blocks: np.ndarray, block_bytes: int, block_size: int) -> Floats:
    """Sizes of an attention launch [..., 2]: megabytes of K and V, and of those in blocks of less than 64 tokens."""
    mb = np.asarray(attended_blocks, dtype=np.float64) * block_bytes / MB
    return np.stack([mb, mb * (block_size < FULL_BLOCK_TOKENS)], axis=-1)


def attention_ctas(
    shape: ModelShape, sparse: SparseConfig, method: str, n_rows: np.ndarray, context_tokens: np.ndarray, places: float
) -> Floats:
    """CTAs of an attention launch [step]: (row, KV head) pairs times the splits that the launcher chooses for them."""
    dense = get_method(method).dense
    rows = np.asarray(n_rows, dtype=np.int64)
    blocks = -(-np.asarray(context_tokens) // np.maximum(rows, 1) // sparse.block_size).astype(np.int64)
    found = np.zeros(rows.shape)
    for n, n_blocks in {(int(r), int(b) if dense else sparse.topk) for r, b in zip(rows, blocks, strict=True)}:
        units = tile_units(n_blocks, sparse.block_size, _TILE_TOKENS)
        ctas = n * shape.n_kv_heads * choose_splits(n * shape.n_kv_heads, units, int(places))
        found[(rows == n) & ((blocks == n_blocks) | (not dense))] = ctas
    return found


def rest_mb(shape: ModelShape, n_rows: np.ndarray) -> Floats:
    """Megabytes that the small kernels of a layer read and write beside its matrices."""
    width = _HIDDEN_PASSES * shape.hidden_size + _MLP_PASSES * shape.intermediate_size
    return np.asarray(n_rows, dtype=np.float64) * width * shape.dtype_bytes / MB


def logits_mb(shape: ModelShape, n_rows: np.ndarray) -> Floats:
    """Megabytes of logits, written by the head and read by sampling."""
    return np.asarray(n_rows, dtype=np.float64) * 2 * shape.vocab_size * shape.dtype_bytes / MB


def merge_mb(shape: ModelShape, n_rows: np.ndarray) -> Floats:
    """Megabytes of a merge: two partial outputs with their log-sum-exps read, one output written."""
    partial = (shape.head_dim + 1) * PARTIAL_BYTES
    per_row = shape.n_q_heads * (2 * partial + shape.head_dim * shape.dtype_bytes)
    return np.asarray(n_rows, dtype=np.float64) * per_row / MB


@dataclass(frozen=True)
class EngineCostModel(CostModel):
    """Costs on a profile that has engine terms. ``slots``: a head, 0 for dense attention."""

    slots: int = 0

    @property
    def terms(self) -> EngineTerms:
        if self.hardware.engine is None:
            raise HardwareError(f"hardware {self.hardware.name} has no engine.json; calibrate it on engine runs")
        return self.hardware.engine

    @property
    def dense(self) -> bool:
        return get_method(self.method).dense

    def select_us(self, context_tokens: np.ndarray, n_sequences: np.ndarray) -> Floats:
        t = self.terms
        if self.dense:
            return np.where(n_sequences > 0, t.append_us, 0.0)
        sizes = select_features(self.shape, self.sparse, self.method, self.slots, n_sequences, context_tokens)
        weights = np.array(
            [
                t.select_score_us,
                t.select_us_per_head,
                t.select_us_per_block,
                t.select_us_per_compare,
                t.select_us_per_mb,
            ]
        )
        return np.where(n_sequences > 0, t.select_fixed_us + sizes @ weights, 0.0)

    def attention_us(self, attended_blocks: np.ndarray) -> Floats:
        """What one launch takes for its blocks, its fixed part too where there is none; CTAs are apart."""
        t = self.terms
        fixed = t.dense_attention_fixed_us if self.dense else t.attention_fixed_us
        sizes = attention_features(attended_blocks, self.device_block_bytes, self.sparse.block_size)
        return fixed + sizes @ np.array([t.attention_us_per_mb, t.attention_us_per_small_mb])

    def cta_us(self, loads: LayerStepMisses) -> Floats:
        """What the CTAs of an attention launch take beside their bytes [step, 1]."""
        ctas = attention_ctas(
            self.shape, self.sparse, self.method, loads.n_sequences, loads.context_tokens, self.terms.attention_places
        )
        return (ctas * self.terms.attention_us_per_cta)[:, None]

    def merge_us(self, n_sequences: np.ndarray) -> Floats:
        return self.terms.merge_fixed_us + merge_mb(self.shape, n_sequences) * self.terms.attention_us_per_mb

    def attention_split(self, loads: LayerStepMisses) -> AttentionSplit:
        """Both launches and the merge run in every layer, whatever was missed; dense attention is one launch."""
        on = (loads.n_sequences > 0)[:, None]
        misses = np.minimum(loads.misses, loads.attended_blocks)
        ctas_us = self.cta_us(loads)
        hits = np.where(on, self.attention_us(loads.attended_blocks - misses) + ctas_us, 0.0)
        if self.dense:
            return AttentionSplit(hits, np.zeros_like(hits))
        late = self.attention_us(misses) + ctas_us + self.merge_us(loads.n_sequences)[:, None]
        return AttentionSplit(hits, np.where(on, late, 0.0))

    def table_us(self, n: int, k: int, n_rows: np.ndarray) -> Floats:
        """One product alone, from the table; where it was not measured by the profile's roofline."""
        found = self.terms.matrix(n, k)
        return super().matrix_us(n * k, 1, n_rows) if found is None else found.at(n_rows)

    def layer_matrices_us(self, n_rows: np.ndarray) -> Floats:
        """All products of a layer, each alone."""
        return sum((self.table_us(n, k, n_rows) for n, k in layer_matrices(self.shape)), np.zeros(len(n_rows)))

    def speculation(self, guessed: Ints, covered: Ints) -> Speculation:
        fixed_us, _, us_per_mb = self.terms.fetch(beside=True)
        n_bytes = guessed * self.host_block_bytes
        return Speculation(
            fixed_us=np.where(n_bytes > 0, fixed_us, 0.0),
            bytes_us=n_bytes / MB * us_per_mb,
            n_bytes=n_bytes,
            covered_bytes=covered * self.host_block_bytes,
        )

    def step_costs(self, loads: LayerStepMisses, *, beside: bool = False) -> StepCosts:
        t, hardware, rows = self.terms, self.hardware, loads.n_sequences
        shape = loads.misses.shape
        require(shape[1] == self.shape.n_layers, f"{shape[1]} layers of misses for a model of {self.shape.n_layers}")
        on = rows > 0
        h2d_bytes = loads.misses.astype(np.int64) * self.host_block_bytes
        d2h_bytes = loads.filled_blocks.astype(np.int64) * self.host_block_bytes
        fixed_us, layer_us, us_per_mb = t.fetch(beside=beside)
        fork_us = t.fork_us if beside and not self.dense else 0.0

        def per_layer(values: Floats | float) -> Floats:
            column = np.where(on, values, 0.0)
            return np.broadcast_to(column[:, None], shape)

        rest = t.rest_fixed_us + t.rest_matrix_scale * self.layer_matrices_us(rows)
        head = t.step_head_scale * self.table_us(*head_matrix(self.shape), rows)
        return StepCosts(
            host_us=np.zeros(shape),
            select_us=per_layer(self.select_us(loads.context_tokens.astype(np.float64), rows) + fork_us),
            h2d_fixed_us=per_layer(0.0 if self.dense else fixed_us),
            h2d_us=h2d_bytes / MB * us_per_mb + np.where(h2d_bytes > 0, layer_us, 0.0),
            attention_us=np.where(on[:, None], self.attention_us(loads.attended_blocks) + self.cta_us(loads), 0.0),
            gemm_us=per_layer(rest + t.rest_us_per_mb * rest_mb(self.shape, rows)),
            d2h_fixed_us=np.where(d2h_bytes > 0, hardware.d2h_fixed_us, 0.0),
            d2h_us=d2h_bytes / (hardware.d2h_gbps * 1e3),
            step_host_us=np.where(on, t.step_fixed_us, 0.0),
            tail_us=np.where(on, head + t.step_us_per_mb * logits_mb(self.shape, rows), 0.0),
            h2d_bytes=h2d_bytes,
            d2h_bytes=d2h_bytes,
            sharing=t.sharing,
            conversion=self.conversion(loads.misses, loads.filled_blocks),
        )
