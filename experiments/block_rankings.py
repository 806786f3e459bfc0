"""What KV blocks of one document can be ranked by: the engine's scores and betas, true attention mass, simple rules.

Everything is computed from the queries, keys and values that the engine's prefill makes. True mass is the share of
softmax attention that a block gets, a KV head's query heads averaged; with ``biased`` beta is added as in NOSA's own
attention, so that it is what NOSA would attend to if it selected everything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nosa_sys.engine.prefill import prefill_logits
from nosa_sys.engine.setup import default_prefill_chunk
from nosa_sys.kernels.block_pooling.reference import pool_windows
from nosa_sys.kernels.block_selection.reference import QUERY_AWARE, select_blocks
from nosa_sys.kernels.compressed_keys.reference import window_means
from nosa_sys.kernels.stage1_scores.reference import stage1_scores_causal
from nosa_sys.methods import get_method
from nosa_sys.models.llama import LlamaModel
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.training.attention import membership
from nosa_sys.training.observation import observed, token_shares

_QUERIES_AT_ONCE = 64


@dataclass(frozen=True)
class LayerInputs:
    """One layer of one document: q [query, q_head, head_dim] roped, at the positions asked for; of every token k roped
    and v [token, kv_head, head_dim], and beta [token, kv_head]."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor


@dataclass
class _Parts:
    q: list[Tensor] = field(default_factory=list)
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    beta: list[Tensor] = field(default_factory=list)


def record(
    model: LlamaModel,
    tokens: Sequence[int],
    sparse: SparseConfig,
    positions: Tensor,
    on_layer: Callable[[int], None] | None = None,
) -> list[LayerInputs]:
    """Inputs of every layer's attention in a prefill with NOSA's selection; ``positions`` [query] ascending.

    ``on_layer`` hears the number of a layer as a chunk comes to it.
    """
    parts = [_Parts() for _ in range(model.n_layers)]

    def keep(layer: int, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> None:
        kept = parts[layer]
        first = sum(len(part) for part in kept.k)
        inside = (positions >= first) & (positions < first + len(q))
        kept.q.append(q[positions[inside] - first])
        kept.k.append(k)
        kept.v.append(v)
        kept.beta.append(beta)
        if on_layer is not None:
            on_layer(layer)

    chunk = default_prefill_chunk(model.device.type)
    prefill_logits(observed(model, keep), tokens, sparse, first=len(tokens) - 1, chunk=chunk)
    return [LayerInputs(*(torch.cat(getattr(p, name)) for name in ("q", "k", "v", "beta"))) for p in parts]


@torch.no_grad()
def block_mass(inputs: LayerInputs, positions: Tensor, block_size: int, *, biased: bool = False) -> Tensor:
    """Share of each query's attention in each block: [query, kv_head, block] float32, mean over the head's queries."""
    n_blocks = -(-len(inputs.k) // block_size)
    out = torch.zeros(len(positions), inputs.k.shape[1], n_blocks, device=inputs.k.device)
    for start in range(0, len(positions), _QUERIES_AT_ONCE):
        part = slice(start, start + _QUERIES_AT_ONCE)
        n_seen = int(positions[part].max()) // block_size + 1
        end = n_seen * block_size
        beta = inputs.beta[:end] if biased else None
        shares = token_shares(inputs.q[part], inputs.k[:end], positions[part], beta).mean(2)  # [kv_head, query, token]
        shares = torch.nn.functional.pad(shares, (0, end - shares.shape[2]))
        out[part, :, :n_seen] = shares.unflatten(2, (n_seen, block_size)).sum(3).transpose(0, 1).float()
    return out


class Rankings:
    """Values by which the blocks of one layer can be ranked, each [query, kv_head, block], higher first.

    ``positions`` [query] ascending are those of ``inputs.q``; ``grid`` [n] are the indices of queries spread over the
    whole document, over which mass is averaged for the static and the accumulated rankings. ``mass`` is of
    ``block_mass``. Values of blocks that do not exist yet, or are always selected, mean nothing.
    """

    def __init__(
        self, inputs: LayerInputs, positions: Tensor, grid: Tensor, cfg: SparseConfig, mass: Tensor, seed: int
    ) -> None:
        self._inputs, self._positions, self._grid, self.cfg, self._seed = inputs, positions, grid, cfg, seed
        self.mass = mass
        self.n_blocks = positions // cfg.block_size + 1
        self._width = mass.shape[2]
        self._windows = ((positions + 1 - cfg.kernel_size) // cfg.kernel_stride + 1).clamp(min=0)
        self.scores = self._pooled_scores()

    def _pooled_scores(self) -> Tensor:
        cfg = self.cfg
        key_means = window_means(self._inputs.k, cfg.kernel_size, cfg.kernel_stride).transpose(0, 1)
        parts = []
        for start in range(0, len(self._positions), _QUERIES_AT_ONCE):
            part = slice(start, start + _QUERIES_AT_ONCE)
            positions = self._positions[part]
            scores = stage1_scores_causal(
                self._inputs.q[part], key_means, positions, cfg.kernel_size, cfg.kernel_stride
            )
            parts.append(pool_windows(scores, self._windows[part], self._width, cfg))
        return torch.cat(parts)

    # ---- what the engine has
    def beta_max(self) -> Tensor:
        """Pooled betas as the engine ranks by them: the best window of a block."""
        cfg = self.cfg
        means = window_means(self._inputs.beta, cfg.kernel_size, cfg.kernel_stride).T
        return pool_windows(means.expand(len(self._positions), -1, -1), self._windows, self._width, cfg)

    def beta_mean(self) -> Tensor:
        """Mean beta of a block's tokens."""
        return self._everywhere(self._of_blocks(self._inputs.beta).mean(1))

    def beta_log_sum_exp(self) -> Tensor:
        """Log of the sum of exp(beta) over a block's tokens: what the bias adds to a block's weight in attention."""
        return self._everywhere(self._of_blocks(self._inputs.beta).logsumexp(1))

    def past_scores(self) -> Tensor:
        """Mean stage-1 score over earlier queries: causal, from compressed keys alone."""
        return self._past(self.scores)

    # ---- rules without anything learned
    def recent(self) -> Tensor:
        """The most recent block first."""
        return torch.arange(self._width, device=self.mass.device).expand_as(self.mass).to(self.mass.dtype)

    def drawn(self) -> Tensor:
        """One random order of the blocks for each KV head."""
        generator = torch.Generator().manual_seed(self._seed)
        order = torch.rand(self.mass.shape[1:], generator=generator)
        return order.to(self.mass.device).expand_as(self.mass)

    def small_key_norms(self) -> Tensor:
        """The smallest mean norm of a block's keys first."""
        return -self.large_key_norms()

    def large_key_norms(self) -> Tensor:
        """The largest mean norm of a block's keys first."""
        return self._everywhere(self._of_blocks(self._inputs.k.float().norm(dim=2)).mean(1))

    # ---- ideal orders, which need the attention that selection saves
    def past_mass(self) -> Tensor:
        """Mean true mass over the earlier queries since the block was full: accumulated attention, causal."""
        return self._past(self.mass)

    def later_mass(self) -> Tensor:
        """Mean true mass over all queries of the document whose window the block has left: one order for ever."""
        return self._later(self.mass)

    def later_mass_for_age(self) -> Tensor:
        """``later_mass`` over what blocks of the same ages get on average: what a block's content alone says."""
        candidates, ages, by_age, _ = self._by_age()
        got = self.mass[self._grid].masked_fill(~candidates, 0.0).sum(0)
        expected = by_age[:, ages].masked_fill(~candidates[:, 0], 0.0).sum(1)
        return (got / expected.clamp(min=torch.finfo(got.dtype).tiny)).expand_as(self.mass)

    def later_mass_with_slope(self) -> Tensor:
        """Log of ``later_mass_for_age`` plus a slope times the block's index, one slope a KV head: that by which log
        mass falls with age. Content and recency in one order for ever, since all blocks age alike."""
        _, _, by_age, counts = self._by_age()
        ages = torch.arange(self._width, device=self.mass.device).to(by_age.dtype)
        weights = counts / counts.sum().clamp(min=1)
        log_mass = by_age.clamp(min=torch.finfo(by_age.dtype).tiny).log()
        centred = ages - (weights * ages).sum()
        slope = -(weights * centred * log_mass).sum(1) / (weights * centred**2).sum().clamp(min=1e-9)
        return self.later_mass_for_age().log() + slope.view(-1, 1) * ages

    def _by_age(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Candidates [grid query, 1, block], ages in blocks [grid query, block], mean mass [kv_head, age] of candidates
        of each age, and their number [age]."""
        candidates, ids = self._candidates(), torch.arange(self._width, device=self.mass.device)
        ages = (self.n_blocks[self._grid].view(-1, 1) - 1 - ids).clamp(min=0)
        got = self.mass[self._grid].masked_fill(~candidates, 0.0).transpose(0, 1).flatten(1)
        sums = torch.zeros(len(got), self._width, dtype=got.dtype, device=got.device)
        sums.scatter_add_(1, ages.flatten().expand(len(got), -1), got)
        counts = torch.bincount(ages[candidates[:, 0]], minlength=self._width)
        return candidates, ages, sums / counts.clamp(min=1), counts

    def later_mass_unpicked(self) -> Tensor:
        """As ``later_mass``, but a query that picks the block by its score counts as zero: what only the fill keeps."""
        at = self._grid
        scores = self.scores[at]
        chosen = select_blocks(scores, scores, self.n_blocks[at], self.cfg, get_method("nosa"))
        by_score = torch.where(chosen.origins == QUERY_AWARE, chosen.block_ids, -1)
        picked = membership(by_score, self._width).transpose(0, 1)
        left = self.mass.clone()
        left[at] = left[at].masked_fill(picked, 0.0)
        return self._later(left)

    # ---- helpers
    def _of_blocks(self, x: Tensor) -> Tensor:
        """[token, kv_head] -> [block, token in it, kv_head], a last partial block left out (it is the current one)."""
        size = self.cfg.block_size
        return x[: len(x) // size * size].unflatten(0, (-1, size))

    def _everywhere(self, by_block: Tensor) -> Tensor:
        """[block, kv_head] -> the same for every query."""
        padded = torch.nn.functional.pad(by_block.T, (0, self._width - len(by_block)))
        return padded.expand(len(self._positions), -1, -1)

    def _candidates(self) -> Tensor:
        """bool [grid query, 1, block]: neither sink nor in the window."""
        ids = torch.arange(self._width, device=self.mass.device)
        first_in_window = (self.n_blocks[self._grid] - 1 - self.cfg.local_blocks).view(-1, 1, 1)
        return (ids >= self.cfg.init_blocks) & (ids < first_in_window)

    def _later(self, values: Tensor) -> Tensor:
        candidates = self._candidates()
        total = values[self._grid].masked_fill(~candidates, 0.0).sum(0)
        return (total / candidates.sum(0).clamp(min=1)).expand_as(values)

    def _past(self, values: Tensor) -> Tensor:
        grid_positions = self._positions[self._grid]
        ids = torch.arange(self._width, device=values.device)
        full = (grid_positions.view(-1, 1) >= (ids + 1) * self.cfg.block_size).unsqueeze(1)
        sums = values[self._grid].masked_fill(~full, 0.0).cumsum(0)
        counts = full.cumsum(0).clamp(min=1)
        last = torch.searchsorted(grid_positions, self._positions) - 1  # the last grid query before each query
        return torch.where((last >= 0).view(-1, 1, 1), (sums / counts)[last.clamp(min=0)], 0.0)


@dataclass(frozen=True)
class Rule:
    """A method of the engine with rankings in place of its own: ``picks`` for the query-aware blocks, ``fill`` for the
    query-agnostic ones, names of ``Rankings`` members."""

    name: str
    method: str = "nosa"
    picks: str = "scores"
    fill: str = "beta_max"
    select_blocks: int | None = None
    local_blocks: int | None = None

    def budgets(self, cfg: SparseConfig) -> SparseConfig:
        """``cfg`` with the rule's own query-aware share and window, where it has them."""
        local_blocks = cfg.local_blocks if self.local_blocks is None else self.local_blocks
        select_blocks = cfg.select_blocks if self.select_blocks is None else self.select_blocks
        return dataclasses.replace(cfg, window_size=local_blocks * cfg.block_size, select_blocks=select_blocks)


@torch.no_grad()
def select(rule: Rule, values: dict[str, Tensor], n_blocks: Tensor, cfg: SparseConfig) -> Tensor:
    """Blocks that ``rule`` selects, by the engine's own ``select_blocks``: int32 [query, kv_head, k].

    ``values`` [query, kv_head, block] by the name of the ranking; n_blocks [query].
    """
    chosen = select_blocks(values[rule.picks], values[rule.fill], n_blocks, rule.budgets(cfg), get_method(rule.method))
    return chosen.block_ids


def mass_inside(mass: Tensor, block_ids: Tensor) -> Tensor:
    """mass [query, kv_head, block] and block_ids [query, kv_head, k] -> share inside the selection [query, kv_head]."""
    return (mass * membership(block_ids, mass.shape[2]).transpose(0, 1)).sum(-1)
