"""Attention methods as special cases of one selection rule, a torch-free registry.

A method decides how many of the free picks are query-aware (``a``) and whether beta biases attention;
the rest of the budget is the query-agnostic fill. Both selections (torch and numpy) ask here.
"""

from __future__ import annotations

from dataclasses import dataclass

from nosa_sys.errors import ConfigError
from nosa_sys.sparse_config import SparseConfig

HEADS = ("ed_dma", "dma", "none")


@dataclass(frozen=True)
class Method:
    """Base: NOSA itself. ``name`` is the CLI word; ``uses_beta`` tells whether beta enters the softmax."""

    name: str
    summary: str
    dense: bool = False
    uses_beta: bool = True

    def query_budget(self, cfg: SparseConfig) -> int:
        """K_Q: size of the query-aware top-k, forced blocks included."""
        return cfg.query_budget

    def query_aware_picks(self, cfg: SparseConfig, n_forced: int) -> int:
        """a = max(0, K_Q - |F|)."""
        return max(0, self.query_budget(cfg) - n_forced)

    def check(self, cfg: SparseConfig) -> None:
        """Refuse a configuration that the method's guarantees do not cover."""
        if cfg.select_blocks < 1:
            raise ConfigError(
                f"select_blocks={cfg.select_blocks} must be >= 1 for method {self.name} "
                "(use method dma for no query-aware share)"
            )

    def fill(self, cfg: SparseConfig, n_forced: int) -> int:
        """m = k - |F| - a: query-agnostic blocks."""
        return cfg.topk - n_forced - self.query_aware_picks(cfg, n_forced)

    def max_loads(self, cfg: SparseConfig, n_blocks: int) -> int:
        """Loads bound of one step: min(a, max(0, N - k))."""
        if self.dense:
            return 0
        return min(self.query_aware_picks(cfg, cfg.n_forced), max(0, n_blocks - cfg.topk))

    def min_overlap(self, cfg: SparseConfig, n_blocks_before: int, n_blocks_after: int) -> int:
        """Exact lower bound on |G' & G| between consecutive steps with N_before >= k."""
        if self.dense or n_blocks_before < cfg.topk:
            return min(n_blocks_before, n_blocks_after)
        n_forced = cfg.n_forced
        a, m = self.query_aware_picks(cfg, n_forced), self.fill(cfg, n_forced)
        candidates = n_blocks_before - n_forced
        born = n_blocks_after - n_blocks_before
        return (n_forced - born) + m + max(0, 2 * a - (candidates - m))


class _InfLLMv2(Method):
    def query_budget(self, cfg: SparseConfig) -> int:
        return cfg.topk

    def check(self, cfg: SparseConfig) -> None:
        return


class _DMA(Method):
    def query_budget(self, cfg: SparseConfig) -> int:
        return cfg.init_blocks + cfg.local_blocks

    def check(self, cfg: SparseConfig) -> None:
        return


class _Full(Method):
    def query_budget(self, cfg: SparseConfig) -> int:
        return 0

    def check(self, cfg: SparseConfig) -> None:
        return


METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method("nosa", "query-aware picks plus a query-agnostic core: locality guaranteed"),
        _InfLLMv2("infllmv2", "every free pick query-aware, no beta", uses_beta=False),
        _DMA("dma", "no query-aware pick: selection by beta alone, loads always 0"),
        _Full("full", "dense attention, all KV on the device", dense=True, uses_beta=False),
    )
}


def get_method(name: str) -> Method:
    """Look a method up; the error lists the known ones."""
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}; known: {', '.join(METHODS)}")
    return METHODS[name]
