"""SparseConfig: the block-sparse budgets of NOSA (arXiv 2510.13602, section 3), torch-free.

Symbols follow the paper: ``k`` = topk blocks attended a step, ``k_q`` query-aware, ``k_e`` = query-agnostic
(eviction-head) share including forced blocks; ``K_Q`` = init + local + select, the size of the query-aware top-k.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from nosa_sys.errors import ConfigError


@dataclass(frozen=True)
class SparseConfig:
    """Budgets of one sparse-attention configuration.

    ``block_size``, ``kernel_size``, ``kernel_stride`` and ``window_size`` are tokens;
    ``topk``, ``init_blocks`` and ``select_blocks`` are KV blocks. Raises ConfigError naming the rule broken.

    >>> cfg = SparseConfig()
    >>> cfg.local_blocks, cfg.query_budget, cfg.k_e, cfg.guaranteed_gamma
    (16, 33, 48, 0.75)
    """

    block_size: int = 64
    kernel_size: int = 32
    kernel_stride: int = 16
    topk: int = 64
    init_blocks: int = 1
    window_size: int = 1024
    select_blocks: int = 16

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{field.name}={value!r} must be a whole number")
            low = 0 if field.name in ("init_blocks", "select_blocks") else 1
            if value < low:
                raise ConfigError(f"{field.name}={value} must be >= {low}")
            if value > 2**31 - 1:
                raise ConfigError(f"{field.name}={value} must be < 2^31")
        if self.block_size % self.kernel_stride:
            raise ConfigError(f"block_size={self.block_size} must be a multiple of kernel_stride={self.kernel_stride}")
        if self.kernel_size != 2 * self.kernel_stride:
            raise ConfigError(f"kernel_size={self.kernel_size} must be 2 x kernel_stride={2 * self.kernel_stride}")
        if self.window_size % self.block_size:
            raise ConfigError(f"window_size={self.window_size} must be a multiple of block_size={self.block_size}")
        if self.local_blocks < 1:
            raise ConfigError(f"window_size={self.window_size} must hold at least one block of {self.block_size}")
        if self.query_budget > self.topk:
            raise ConfigError(
                f"init_blocks + window blocks + select_blocks = {self.init_blocks} + {self.local_blocks} + "
                f"{self.select_blocks} = {self.query_budget} exceeds topk={self.topk} "
                f"(k_e = topk - select_blocks = {self.topk - self.select_blocks} must be >= init + window = "
                f"{self.init_blocks + self.local_blocks}, and k_e <= topk); raise topk or lower the others"
            )
        if self.init_blocks + self.local_blocks + 1 > self.topk:
            raise ConfigError(
                f"forced blocks init + window + current = {self.init_blocks + self.local_blocks + 1} exceed "
                f"topk={self.topk}"
            )

    # ---- derived sizes, in blocks
    @property
    def local_blocks(self) -> int:
        """Past blocks in the sliding window; the current block comes on top."""
        return self.window_size // self.block_size

    @property
    def query_budget(self) -> int:
        """K_Q = init + local + select."""
        return self.init_blocks + self.local_blocks + self.select_blocks

    @property
    def n_forced(self) -> int:
        """|F| once the context is long enough: sinks + window + current block."""
        return self.init_blocks + self.local_blocks + 1

    @property
    def k_e(self) -> int:
        """k_e = topk - select_blocks, the blocks that locality is guaranteed for (paper section 3.2)."""
        return self.topk - self.select_blocks

    @property
    def k_q(self) -> int:
        """k_q = select_blocks, the nominal query-aware budget."""
        return self.select_blocks

    @property
    def guaranteed_gamma(self) -> float:
        """k_e / k, the floor of gamma at a single-token step with N >= k."""
        return self.k_e / self.topk

    @property
    def topk_tokens(self) -> int:
        return self.topk * self.block_size

    @property
    def windows_per_block(self) -> int:
        """r = block_size / kernel_stride."""
        return self.block_size // self.kernel_stride

    # ---- geometry at a context length
    def n_blocks(self, context_tokens: int) -> int:
        """N = ceil(L / block_size)."""
        return -(-context_tokens // self.block_size)

    def n_windows(self, context_tokens: int) -> int:
        """M = max(0, floor((L - kernel) / stride) + 1): complete pooling windows."""
        return max(0, (context_tokens - self.kernel_size) // self.kernel_stride + 1)

    # ---- making others
    @classmethod
    def from_tokens(
        cls,
        *,
        block_size: int = 64,
        topk_tokens: int = 4096,
        init_tokens: int = 64,
        window_tokens: int = 1024,
        select_tokens: int = 1024,
        kernel_stride: int = 16,
    ) -> SparseConfig:
        """Budgets given in tokens; each must be a whole number of blocks.

        >>> SparseConfig.from_tokens(block_size=32).topk
        128
        """
        blocks = {}
        for name, tokens in (("topk", topk_tokens), ("init", init_tokens), ("select", select_tokens)):
            if block_size < 1 or tokens % block_size:
                raise ConfigError(f"{name}_tokens={tokens} must be a multiple of block_size={block_size}")
            blocks[name] = tokens // block_size
        return cls(
            block_size=block_size,
            kernel_size=2 * kernel_stride,
            kernel_stride=kernel_stride,
            topk=blocks["topk"],
            init_blocks=blocks["init"],
            window_size=window_tokens,
            select_blocks=blocks["select"],
        )

    def with_block_size(self, block_size: int) -> SparseConfig:
        """The same token budgets at another block size; budgets that do not divide are rounded up to one block.

        Raises ConfigError when k, the window or the query-aware share is no whole number of the new blocks.
        """
        if block_size < 1:
            raise ConfigError(f"block_size={block_size} must be >= 1")
        for name, tokens in (
            ("topk", self.topk_tokens),
            ("select_blocks", self.select_blocks * self.block_size),
        ):
            if tokens % block_size:
                raise ConfigError(f"{name} of {tokens} tokens is no whole number of {block_size}-token blocks")
        return dataclasses.replace(
            self,
            block_size=block_size,
            topk=self.topk_tokens // block_size,
            init_blocks=-(-self.init_blocks * self.block_size // block_size),
            select_blocks=self.select_blocks * self.block_size // block_size,
        )

    def with_topk(self, topk: int) -> SparseConfig:
        """Another k with the ratios window/k and select/k kept, each rounded to whole blocks (at least one)."""
        if topk < 1:
            raise ConfigError(f"topk={topk} must be >= 1")

        def scaled(blocks: int) -> int:
            return max(1, round(blocks * topk / self.topk)) if blocks else 0

        return dataclasses.replace(
            self,
            topk=topk,
            window_size=scaled(self.local_blocks) * self.block_size,
            select_blocks=scaled(self.select_blocks),
        )

    def with_k_e(self, k_e: int) -> SparseConfig:
        """The same k with select_blocks = k - k_e."""
        if not 0 <= k_e <= self.topk:
            raise ConfigError(f"k_e={k_e} must lie in [0, topk={self.topk}]")
        return dataclasses.replace(self, select_blocks=self.topk - k_e)

    def to_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SparseConfig:
        known = {f.name for f in dataclasses.fields(cls)}
        for key in data:
            if key not in known:
                raise ConfigError(f"unknown sparse key {key!r}; known: {', '.join(sorted(known))}")
        return cls(**data)
