"""From blocks and sizes to durations: the cost of every part of a step, each alone on the machine.

The table of formulas with their sources is in docs/simulator.md. Bandwidths are decimal GB/s, so bytes over
``gbps * 1e3`` are microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.simulator.hardware import HardwareProfile
from nosa_sys.simulator.host_storage import HostStorage
from nosa_sys.simulator.invariants import require
from nosa_sys.simulator.step_times import AttentionSplit, Conversion, Floats, Ints, Speculation, StepCosts
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.miss_table import LayerStepMisses

KEY_MEAN_BYTES = 4  # compressed keys are fp32 means
PARTIAL_BYTES = 4  # partial attention outputs and their log-sum-exps are fp32
LAYER_PRODUCTS = 4  # qkv, output projection, gate and up, down: the matrix products of a layer
_BYTES_PER_US = 1e3  # of one GB/s


@dataclass(frozen=True)
class CostModel:
    """Costs of one model under one sparse configuration on one machine.

    ``host_block_bytes`` is what a missed block moves, ``device_block_bytes`` what attention reads of one; ``storage``
    is how the host keeps them where that is another format.
    """

    hardware: HardwareProfile
    shape: ModelShape
    sparse: SparseConfig
    method: str
    host_block_bytes: int
    device_block_bytes: int
    storage: HostStorage | None = None

    def select_us(self, context_tokens: np.ndarray, n_sequences: np.ndarray) -> Floats:
        """Scores over the compressed keys and the top-k over blocks of one layer, [step].

        ``context_tokens`` is summed over the step's ``n_sequences``. One top-k for the query-aware picks and one for
        the fill, each only where the method has such picks; nothing for dense attention. A top-k costs a fixed part, a
        part for every block of every head, and a part for the length of one row (rows run side by side). What is left
        (the token's append, the slot plan) has a fixed part and a part for every row, one KV head of one sequence.
        """
        method = get_method(self.method)
        if method.dense:
            return np.zeros(len(context_tokens))
        hardware, heads = self.hardware, self.shape.n_kv_heads
        windows = context_tokens / self.sparse.kernel_stride
        key_bytes = windows * heads * self.shape.head_dim * KEY_MEAN_BYTES
        n_forced = self.sparse.n_forced
        passes = int(method.query_aware_picks(self.sparse, n_forced) > 0) + int(method.fill(self.sparse, n_forced) > 0)
        blocks = context_tokens / self.sparse.block_size
        row = blocks / np.maximum(n_sequences, 1)
        top_k = (
            hardware.topk_fixed_us + hardware.topk_us_per_element * blocks * heads + hardware.topk_us_per_block * row
        )
        plan = hardware.select_fixed_us + hardware.select_us_per_row * n_sequences * heads
        total = plan + key_bytes / (hardware.key_gbps * _BYTES_PER_US) + passes * top_k
        return np.where(n_sequences > 0, total, 0.0)

    def attention_us(self, attended_blocks: np.ndarray) -> Floats:
        """Attention of one layer over its blocks, all heads and sequences in one launch; as the shape given."""
        hardware = self.hardware
        read = attended_blocks * float(self.device_block_bytes) / (hardware.hbm_gbps * _BYTES_PER_US)
        return np.where(attended_blocks > 0, hardware.attention_fixed_us + read, 0.0)

    def matrix_us(self, parameters: int, n_products: int, n_sequences: np.ndarray) -> Floats:
        """``n_products`` matrices read once and multiplied with one row a sequence, [step].

        The longer of reading and multiplying, the part of the shorter that does not hide behind it, and a fixed part a
        product. One row alone is a matrix-vector product, which reads at a speed of its own.
        """
        hardware = self.hardware
        speed = np.where(n_sequences > 1, hardware.gemm_weight_gbps, hardware.gemv_weight_gbps)
        read = parameters * self.shape.dtype_bytes / (speed * _BYTES_PER_US)
        multiply = 2.0 * parameters * n_sequences / (hardware.gemm_tflops * 1e6)
        exposed = (1.0 - hardware.gemm_overlap) * np.minimum(read, multiply)
        total = n_products * hardware.gemm_fixed_us + np.maximum(read, multiply) + exposed
        return np.where(n_sequences > 0, total, 0.0)

    def merge_us(self, n_sequences: np.ndarray) -> Floats:
        """Two partial attention outputs with their log-sum-exps read, one output written, [step].

        The bytes at the speed of attention's; the launch's fixed part is not priced.
        """
        partial = (self.shape.head_dim + 1) * PARTIAL_BYTES
        row = self.shape.n_q_heads * (2 * partial + self.shape.head_dim * self.shape.dtype_bytes)
        return n_sequences * float(row) / (self.hardware.hbm_gbps * _BYTES_PER_US)

    def attention_split(self, loads: LayerStepMisses) -> AttentionSplit:
        """Attention over hits, and over misses with the merge; a layer without a miss has no second launch."""
        misses = np.minimum(loads.misses, loads.attended_blocks)
        merge = np.where(misses > 0, self.merge_us(loads.n_sequences)[:, None], 0.0)
        return AttentionSplit(self.attention_us(loads.attended_blocks - misses), self.attention_us(misses) + merge)

    def guessed_blocks(self, loads: LayerStepMisses, per_head: int) -> Ints:
        """Blocks fetched on a guess, [step, layer]: ``per_head`` for every KV head, as far as there are any left."""
        heads = self.shape.n_kv_heads
        there = (loads.context_tokens // self.sparse.block_size * heads)[:, None] - loads.attended_blocks
        wanted = (per_head * heads * loads.n_sequences.astype(np.int64))[:, None]
        return np.minimum(wanted, np.maximum(0, there)).astype(np.int64)

    def covered_blocks(self, loads: LayerStepMisses, guessed: Ints, hit_share: float) -> Ints:
        """Misses that the guesses of the step before make needless, [step, layer]; none in the first or a cold step."""
        covered = np.zeros_like(guessed)
        covered[1:] = np.floor(guessed[:-1] * hit_share)
        covered[loads.cold] = 0
        return np.minimum(covered, loads.misses)

    def speculation(self, guessed: Ints, covered: Ints) -> Speculation:
        """What fetching the guessed blocks costs, and the bytes of the misses that they spare."""
        n_bytes = guessed * self.host_block_bytes
        fixed_us, bytes_us = self.fetch_us(n_bytes)
        return Speculation(
            fixed_us=fixed_us,
            bytes_us=bytes_us,
            n_bytes=n_bytes,
            covered_bytes=covered * self.host_block_bytes,
        )

    def conversion(self, arrived: Ints, written: Ints) -> Conversion | None:
        """Bringing blocks to the device's format and back, None where both sides keep the same."""
        if self.storage is None:
            return None
        bytes_a_block = self.host_block_bytes + self.device_block_bytes
        return self.storage.conversion(arrived, written, bytes_a_block, self.hardware)

    def fetch_us(self, n_bytes: Ints) -> tuple[Floats, Floats]:
        """(fixed part, part of the bytes) of fetches of whole blocks, one launch each; as the shape given.

        One block is one run of bytes; where the bundle timed the gather by the size of its runs, both parts are those
        of this size, relative to the 32 KiB that its numbers are for.
        """
        runs = self.hardware.tables.runs
        more_us, factor = (0.0, 1.0) if runs is None else runs.relative(self.host_block_bytes)
        fixed_us = max(0.0, self.hardware.h2d_fixed_us + more_us)
        slope = factor / (self.hardware.link_gbps * _BYTES_PER_US)
        return np.where(n_bytes > 0, fixed_us, 0.0), n_bytes.astype(np.float64) * slope

    def step_costs(self, loads: LayerStepMisses, *, beside: bool = False) -> StepCosts:
        """Costs of every step of a workload, arrays [step, layer]; without a sequence a step costs nothing.

        ``beside``: fetches run next to compute; only profiles with engine terms tell that from fetches in line.
        """
        hardware = self.hardware
        shape = loads.misses.shape
        require(shape[1] == self.shape.n_layers, f"{shape[1]} layers of misses for a model of {self.shape.n_layers}")
        h2d_bytes = loads.misses.astype(np.int64) * self.host_block_bytes
        d2h_bytes = loads.filled_blocks.astype(np.int64) * self.host_block_bytes
        h2d_fixed_us, h2d_us = self.fetch_us(h2d_bytes)

        def per_layer(values: Floats | float) -> Floats:
            column = np.broadcast_to(np.asarray(values, dtype=np.float64), shape[0])
            return np.broadcast_to(column[:, None], shape)

        return StepCosts(
            host_us=per_layer(np.where(loads.n_sequences > 0, hardware.host_per_layer_us, 0.0)),
            select_us=per_layer(self.select_us(loads.context_tokens.astype(np.float64), loads.n_sequences)),
            h2d_fixed_us=h2d_fixed_us,
            h2d_us=h2d_us,
            attention_us=self.attention_us(loads.attended_blocks),
            gemm_us=per_layer(self.matrix_us(self.shape.layer_params, LAYER_PRODUCTS, loads.n_sequences)),
            d2h_fixed_us=np.where(d2h_bytes > 0, hardware.d2h_fixed_us, 0.0),
            d2h_us=d2h_bytes / (hardware.d2h_gbps * _BYTES_PER_US),
            step_host_us=np.full(shape[0], hardware.host_per_step_us),
            tail_us=self.matrix_us(self.shape.vocab_size * self.shape.hidden_size, 1, loads.n_sequences),
            h2d_bytes=h2d_bytes,
            d2h_bytes=d2h_bytes,
            sharing=hardware.sharing,
            conversion=self.conversion(loads.misses, loads.filled_blocks),
        )
