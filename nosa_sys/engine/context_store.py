"""What stays on the device for a whole context: per-token betas, compressed keys and compressed betas.

Window means follow the paper's compressed keys: window i is the mean over tokens [stride * i, stride * i + kernel)
of the stored (roped) keys, and of the betas. They are added as windows complete, in decode from a ring of the last
``kernel`` keys, so that no old key is ever read again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nosa_sys.engine.tensors import doubled, grown, n_bytes
from nosa_sys.kernels.compressed_keys.reference import window_mean_of_tail, window_means
from nosa_sys.model_shape import ModelShape
from nosa_sys.sparse_config import SparseConfig


class ContextStore:
    """Per layer: ``key_means`` [lane, kv_head, window, D], ``beta_means`` [lane, kv_head, window],
    ``token_betas`` [lane, kv_head, block, block_size] and ``ring`` [lane, kernel, kv_head, D] (token t at t % kernel).

    Betas and their means are of ``beta_dtype``, fp32 (fp64 for an fp64 model), whatever the dtype of K and V; key means
    of ``means_dtype``, rounded once when they are stored. Without ``kept`` (dense attention selects nothing) nothing is
    stored and every tensor stays empty; sizes are counted all the same. Everything grows by doubling,
    unless an exact size is asked for; ``generation`` counts growths.
    """

    def __init__(
        self,
        shape: ModelShape,
        cfg: SparseConfig,
        dtype: torch.dtype,
        beta_dtype: torch.dtype,
        means_dtype: torch.dtype,
        device: torch.device,
        poison: float | None = None,
        *,
        kept: bool = True,
    ) -> None:
        self._cfg, self._poison, self.kept = cfg, poison, kept
        self.n_lanes = self.n_windows = self.n_blocks = self.generation = 0
        heads, dim, layers = shape.n_kv_heads, shape.head_dim, range(shape.n_layers)

        def empty(*sizes: int, of: torch.dtype = beta_dtype) -> list[Tensor]:
            return [torch.empty(sizes, dtype=of, device=device) for _ in layers]

        self.key_means = empty(0, heads, 0, dim, of=means_dtype)
        self.beta_means = empty(0, heads, 0)
        self.token_betas = empty(0, heads, 0, cfg.block_size)
        self.ring = empty(0, cfg.kernel_size, heads, dim, of=dtype)

    @property
    def allocated_bytes(self) -> int:
        return n_bytes(*self.key_means, *self.beta_means, *self.token_betas, *self.ring)

    def ensure(self, n_lanes: int, n_tokens: int, *, exact: bool = False) -> None:
        """Room for ``n_lanes`` lanes of ``n_tokens`` tokens each; no more than that when ``exact``."""
        cfg = self._cfg
        lanes = doubled(self.n_lanes, n_lanes, exact=exact)
        windows = doubled(self.n_windows, cfg.n_windows(n_tokens), 16, exact=exact)
        blocks = doubled(self.n_blocks, cfg.n_blocks(n_tokens), 4, exact=exact)
        if (lanes, windows, blocks) == (self.n_lanes, self.n_windows, self.n_blocks):
            return
        self.generation += 1
        for index, means in enumerate(self.key_means if self.kept else []):
            heads, dim = means.shape[1], means.shape[3]
            self.key_means[index] = grown(means, (lanes, heads, windows, dim), self._poison)
            self.beta_means[index] = grown(self.beta_means[index], (lanes, heads, windows), self._poison)
            self.token_betas[index] = grown(
                self.token_betas[index], (lanes, heads, blocks, cfg.block_size), self._poison
            )
            self.ring[index] = grown(self.ring[index], (lanes, cfg.kernel_size, heads, dim), self._poison)
        self.n_lanes, self.n_windows, self.n_blocks = lanes, windows, blocks

    def clear_lane(self, lane: int) -> None:
        """Poison what a leaving sequence left behind (lengths alone say what is valid)."""
        if self._poison is None or not self.kept:
            return
        for tensors in (self.key_means, self.beta_means, self.token_betas, self.ring):
            for layer in tensors:
                layer[lane] = self._poison

    def append_chunk(self, layer: int, lane: int, first: int, keys: Tensor, chunk_betas: Tensor) -> Tensor | None:
        """Prefill: add tokens first .. L-1 and the windows they complete; returns the betas [L, kv_head] so far, None
        where nothing is kept.

        ``keys`` [L, kv_head, D] is the whole context, ``chunk_betas`` [L - first, kv_head] the new tokens' alone.
        """
        if not self.kept:
            return None
        cfg, n_tokens = self._cfg, keys.shape[0]
        flat = self.token_betas[layer][lane].flatten(1)
        flat[:, first:n_tokens] = chunk_betas.T
        betas = flat[:, :n_tokens].T
        old, new = cfg.n_windows(first), cfg.n_windows(n_tokens)
        if new > old:
            start = old * cfg.kernel_stride
            key_means = window_means(keys[start:], cfg.kernel_size, cfg.kernel_stride)
            beta_means = window_means(betas[start:], cfg.kernel_size, cfg.kernel_stride)
            self.key_means[layer][lane, :, old:new] = key_means.transpose(0, 1)
            self.beta_means[layer][lane, :, old:new] = beta_means.T
        ring, start = self.ring[layer][lane], max(0, n_tokens - cfg.kernel_size)
        at = start % cfg.kernel_size
        n_before_wrap = min(n_tokens - start, cfg.kernel_size - at)
        ring[at : at + n_before_wrap] = keys[start : start + n_before_wrap]
        ring[: n_tokens - start - n_before_wrap] = keys[start + n_before_wrap :]
        return betas

    def append_tokens(self, layer: int, lanes: Tensor, positions: Tensor, keys: Tensor, betas: Tensor) -> None:
        """Decode, in a kept context: one token a lane. ``lanes``, ``positions`` int64 [batch], keys [batch, kv_head,
        D], betas [batch, kv_head]."""
        size = self._cfg.block_size
        self.ring[layer][lanes, positions % self._cfg.kernel_size] = keys
        self.token_betas[layer][lanes, :, positions // size, positions % size] = betas

    def complete_windows(self, layer: int, lanes: Tensor, lengths: Tensor) -> Tensor:
        """Add the window that ends at token length - 1, for lanes that complete one; int64 [n] each.

        Returns the new beta means [n, kv_head]."""
        cfg = self._cfg
        tail = lengths[:, None] - cfg.kernel_size + torch.arange(cfg.kernel_size, device=lengths.device)
        window = (lengths - cfg.kernel_size) // cfg.kernel_stride
        keys = self.ring[layer][lanes[:, None], tail % cfg.kernel_size]
        size = cfg.block_size
        betas = self.token_betas[layer][lanes[:, None], :, tail // size, tail % size]
        self.key_means[layer][lanes, :, window] = window_mean_of_tail(keys).to(self.key_means[layer].dtype)
        beta_means = window_mean_of_tail(betas)
        self.beta_means[layer][lanes, :, window] = beta_means
        return beta_means
