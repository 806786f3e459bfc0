"""Injected selections: block sets from a miss rate or a trace, in place of what the model would have chosen.

For timing shapes whose weights are not at hand with a chosen or recorded locality. The engine scores and selects all
the same (that cost is paid) and then takes these sets. The locality theorem is about sets that a model chose by one
fixed order: it does not hold for injected ones, and no check of it applies to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nosa_sys.errors import ConfigError
from nosa_sys.kernels.block_selection.reference import DENSE, QUERY_AWARE, SINK, WINDOW
from nosa_sys.methods import Method, get_method
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.playback import heads_in_turn, layers_by_depth, recorded_sets
from nosa_sys.traces.reader import Trace

# Misses of a head and step: a mean, or {count: weight}.
Misses = float | Mapping[int, float]


@dataclass(frozen=True)
class Injection:
    """Sets for every step of a run.

    ``ids_table`` int32 [step, layer, batch, kv_head, k] on the model's device, ascending, -1 padded; the row's current
    block is always in its set. Step 0 is the cold step: row b consumes position ``contexts[b]`` - 1 there, and one
    token more at every further step. ``contexts``: prompt tokens of each row. ``guess_table`` int32
    [step, layer, batch, kv_head, k + n], ascending, -1 padded: the set and what schedule prefetch guesses beside it.
    """

    ids_table: Tensor
    label: str
    contexts: list[int]
    guess_table: Tensor | None = None

    @property
    def n_steps(self) -> int:
        return self.ids_table.shape[0]

    def check_step(self, step: int, lanes: Sequence[int], positions: Sequence[int]) -> None:
        """ConfigError past the last step, and where a row is not at the position that its sets were made for."""
        if step >= self.n_steps:
            raise ConfigError(f"step {step} is past the {self.n_steps} injected steps; inject more")
        for lane, position in zip(lanes, positions, strict=True):
            if position != self.contexts[lane] - 1 + step:
                raise ConfigError(
                    f"row {lane} is at position {position} in step {step}, its injected sets are for position "
                    f"{self.contexts[lane] - 1 + step}: all sequences must start at once, with so many tokens"
                )

    def fresh_counts(self, first: int, last: int, sparse: SparseConfig) -> tuple[Tensor, Tensor]:
        """Of steps first .. last - 1 (first >= 1): misses with slots = k, and blocks kept from the step before.

        Both int64 [step, layer, batch, kv_head]. Misses leave out the block born at the step; gamma is kept blocks
        over all of the set.
        """
        misses, kept = [], []
        contexts = torch.tensor(self.contexts, device=self.ids_table.device)
        for step in range(first, last):
            old, new = self.ids_table[step - 1], self.ids_table[step]
            known = (new[..., :, None] == old[..., None, :]).any(-1) & (new >= 0)
            born = (contexts - 1 + step) % sparse.block_size == 0
            kept.append(known.sum(-1))
            misses.append((new >= 0).sum(-1) - kept[-1] - born[:, None].long())
        return torch.stack(misses), torch.stack(kept)


def synthetic_injection(
    sparse: SparseConfig,
    method: str | Method,
    n_layers: int,
    n_kv_heads: int,
    contexts: Sequence[int],
    n_steps: int,
    misses: Misses | Sequence[tuple[int, Misses]],
    seed: int = 0,
    device: torch.device | str = "cpu",
    reuse: float = 0.0,
) -> Injection:
    """Sets in which each (layer, row, head) has on average ``misses`` blocks a step that its last set had not.

    A mean m gives floor(m) or ceil(m) misses, spread evenly over steps and in turn over heads; a mapping
    {count: weight} draws independently. A list of (steps, misses) changes the rate on the way; its steps come after
    the cold one and add up to n_steps - 1. Sinks, window and current block are always in; a born block is no miss.
    Which blocks come and go is drawn uniformly from those that may, so that a hot buffer sees next to no reuse; with
    ``reuse`` in [0, 1] that share of a set's changes brings back the blocks that left it last. Counts are capped at the
    method's query-aware picks and at the blocks outside the set.

    Raises ConfigError for dense methods, contexts < 1 and rates < 0.
    """
    method = get_method(method) if isinstance(method, str) else method
    if method.dense:
        raise ConfigError(f"method {method.name} attends to everything; there is no selection to inject")
    if not 0 <= reuse <= 1:
        raise ConfigError(f"reuse={reuse} must lie in [0, 1]")
    if not contexts or min(contexts) < 1 or n_steps < 1:
        raise ConfigError(f"contexts={list(contexts)[:3]} and n_steps={n_steps} must be >= 1")
    device = torch.device(device)
    cells = (n_layers, len(contexts), n_kv_heads)
    generator = torch.Generator(device).manual_seed(seed)
    counts = _miss_counts(misses, n_steps, cells, generator)
    cap = method.query_aware_picks(sparse, sparse.n_forced)
    drawn = _SetWalk(sparse, cells, contexts, n_steps, cap, reuse, generator)
    table = torch.empty((n_steps, *cells, sparse.topk), dtype=torch.int32, device=device)
    drawn.begin(table[0])
    for step in range(1, n_steps):
        drawn.advance(step, counts[step - 1], table[step])
    n_drawn = float(drawn.n_misses) / max(1, (n_steps - 1) * math.prod(cells))
    label = f"synthetic sets, {_named(misses)} misses a head and step asked, {n_drawn:.3g} drawn, seed {seed}"
    if reuse:
        label += f", {reuse:g} of them of blocks that left last"
    return Injection(table, label, list(contexts))


def geometric_origins(block_ids: NDArray[np.int32], n_blocks: Sequence[int], sparse: SparseConfig) -> NDArray[np.int8]:
    """Origins of injected ids [layer, batch, kv_head, k], for which no ranking speaks: sink, window, and query-aware
    for every other block; dense in rows of at most k blocks, -1 for padding. ``n_blocks``: blocks of each row."""
    blocks = np.array(n_blocks, dtype=np.int32)[:, None, None]
    origins = np.full(block_ids.shape, QUERY_AWARE, dtype=np.int8)
    np.copyto(origins, SINK, where=block_ids < sparse.init_blocks)
    np.copyto(origins, WINDOW, where=block_ids >= blocks - 1 - sparse.local_blocks)
    if blocks.min() <= sparse.topk:
        np.copyto(origins, DENSE, where=blocks <= sparse.topk)
    if block_ids.min(initial=0) < 0:
        np.copyto(origins, -1, where=block_ids < 0)
    return origins


def _named(misses: Misses | Sequence[tuple[int, Misses]]) -> str:
    if isinstance(misses, Mapping):
        return " ".join(f"{count}:{weight:g}" for count, weight in misses.items())
    if isinstance(misses, Sequence):
        return "then ".join(f"{_named(rate)} for {steps} steps, " for steps, rate in misses).rstrip(", ")
    return f"{misses:g}"


def _miss_counts(
    misses: Misses | Sequence[tuple[int, Misses]], n_steps: int, cells: tuple[int, ...], generator: torch.Generator
) -> Tensor:
    """int64 [step, layer, row, head] of the steps after the cold one."""
    if not isinstance(misses, Mapping) and isinstance(misses, Sequence):
        if sum(steps for steps, _ in misses) != n_steps - 1:
            raise ConfigError(f"segments of {[steps for steps, _ in misses]} steps must add up to {n_steps - 1}")
        return torch.cat([_miss_counts(rate, steps + 1, cells, generator) for steps, rate in misses])
    device = generator.device
    if isinstance(misses, Mapping):
        if not misses or min(misses) < 0 or min(misses.values()) < 0 or sum(misses.values()) <= 0:
            raise ConfigError(f"misses {dict(misses)} must map counts >= 0 to weights >= 0, not all zero")
        bounds = torch.tensor(list(misses.values()), dtype=torch.float64, device=device).cumsum(0)
        noise = torch.rand((n_steps - 1, *cells), dtype=torch.float64, device=device, generator=generator)
        picks = torch.searchsorted(bounds, noise * bounds[-1], right=True).clamp(max=len(misses) - 1)
        return torch.tensor(list(misses), device=device)[picks]
    if not 0 <= misses < math.inf:
        raise ConfigError(f"misses={misses} must be a number >= 0")
    start = torch.rand(cells, dtype=torch.float64, device=device, generator=generator)
    ends = torch.arange(n_steps, dtype=torch.float64, device=device).view(-1, 1, 1, 1) * misses + start
    return ends.floor().long().diff(dim=0)


class _SetWalk:
    """The sets of all cells as masks [layer, row, head, block], moved on step by step."""

    def __init__(
        self,
        sparse: SparseConfig,
        cells: tuple[int, ...],
        contexts: Sequence[int],
        n_steps: int,
        cap: int,
        reuse: float,
        generator: torch.Generator,
    ) -> None:
        self._sparse, self._generator, self._cap, self._reuse = sparse, generator, cap, reuse
        device = generator.device
        self._contexts = torch.tensor(list(contexts), device=device)
        n_blocks = sparse.n_blocks(max(contexts) + n_steps - 1)
        self._ids = torch.arange(n_blocks, dtype=torch.int32, device=device)
        self._members = torch.zeros((*cells, n_blocks), dtype=torch.bool, device=device)
        self._left = torch.zeros((*cells, n_blocks if reuse else 0), dtype=torch.int32, device=device)
        self.n_misses = torch.zeros((), dtype=torch.int64, device=device)

    def _geometry(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """(forced, candidates) bool [row, 1, block] and free picks int64 [row, 1] at a step."""
        current = ((self._contexts - 1 + step) // self._sparse.block_size)[:, None, None]
        ids = self._ids
        exists = ids <= current
        forced = exists & ((ids < self._sparse.init_blocks) | (ids >= current - self._sparse.local_blocks))
        free = (current[..., 0] + 1).clamp(max=self._sparse.topk) - forced.sum(-1)
        return forced, exists & ~forced, free

    def begin(self, out: Tensor) -> None:
        """The cold step's sets: forced blocks and a random choice of the others."""
        forced, candidates, free = self._geometry(0)
        candidates = candidates.expand_as(self._members)
        self._members = forced | some_of(
            candidates, free.expand(candidates.shape[:-1]), self._sparse.topk, self._generator
        )
        out.copy_(ascending_ids(self._members, self._sparse.topk))

    def advance(self, step: int, wanted: Tensor, out: Tensor) -> None:
        """Move to ``step`` with ``wanted`` int64 [layer, row, head] misses, fewer where no more are possible."""
        forced, candidates, free = self._geometry(step)
        kept, fresh = self._members & candidates, ~self._members & candidates
        n_kept = kept.sum(-1)
        count = wanted.clamp(max=self._cap).minimum(free).minimum(fresh.sum(-1))
        # a block that left the window competes for a free pick, so one kept block more than misses can go
        n_gone = n_kept + count - free
        added = some_of(fresh, count, self._cap, self._generator, self._favour())
        gone = some_of(kept, n_gone, self._cap + 1, self._generator)
        if self._reuse:
            self._left.masked_fill_(gone, step)
        self._members = forced | (kept & ~gone) | added
        self.n_misses += count.sum()
        out.copy_(ascending_ids(self._members, self._sparse.topk))

    def _favour(self) -> Tensor | None:
        """For a share ``reuse`` of the cells, the step at which each block left last."""
        if not self._reuse:
            return None
        shape = self._left.shape[:-1]
        coin = torch.rand(shape, device=self._left.device, generator=self._generator) < self._reuse
        return self._left * coin[..., None]


def some_of(mask: Tensor, count: Tensor, most: int, generator: torch.Generator, favour: Tensor | None = None) -> Tensor:
    """A random subset of ``count`` [...] members of each ``mask`` bool [..., block]; count <= members, <= most.

    ``favour`` int32 [..., block] >= 0: members of a higher number go first.
    """
    most = min(most, mask.shape[-1])
    noise = torch.rand(mask.shape, device=mask.device, generator=generator)
    noise = (noise if favour is None else noise + favour).masked_fill_(~mask, -1.0)
    best = noise.topk(most, dim=-1).indices
    taken = torch.arange(most, device=mask.device) < count[..., None]
    return torch.zeros_like(mask).scatter_(-1, best, taken)


def ascending_ids(members: Tensor, width: int) -> Tensor:
    """Members of ``members`` bool [..., block] as ids int32 [..., width], ascending, -1 padded; at most ``width``."""
    place = (members.cumsum(-1) - 1).masked_fill_(~members, width)
    padded = torch.full((*members.shape[:-1], width + 1), -1, dtype=torch.int32, device=members.device)
    ids = torch.arange(members.shape[-1], dtype=torch.int32, device=members.device)
    return padded.scatter_(-1, place, ids.expand(place.shape))[..., :width]


def trace_injection(
    trace: Trace | Path | str,
    n_layers: int,
    n_kv_heads: int,
    batch: int,
    n_steps: int,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Injection:
    """The recorded sets of a trace: layers by relative depth, KV heads in turn, rows with seeded time offsets.

    Row b plays sequence b modulo their number for ``n_steps`` consecutive recorded rows; the first row of each
    sequence starts at its first record, further ones at drawn records. Contexts follow from the recorded positions, so
    rows have unequal lengths. Run it under the trace's own sparse configuration.

    Raises TraceError for a trace that cannot be played, ConfigError where its sequences have fewer rows than n_steps.
    """
    trace = trace if isinstance(trace, Trace) else Trace.open(trace)
    sets = [s for s in recorded_sets(trace) if len(s.position) >= n_steps]
    if n_steps < 1 or batch < 1:
        raise ConfigError(f"batch={batch} and n_steps={n_steps} must be >= 1")
    if not sets:
        longest = max((len(s.position) for s in recorded_sets(trace)), default=0)
        raise ConfigError(
            f"{n_steps} steps were asked for and the longest sequence of {trace.directory} has {longest} rows; "
            "take fewer steps or capture more tokens"
        )
    rng = np.random.default_rng(seed)
    model = trace.meta.model
    layers, heads = layers_by_depth(n_layers, model.n_layers), heads_in_turn(n_kv_heads, model.n_kv_heads)
    table = np.empty((n_steps, n_layers, batch, n_kv_heads, trace.meta.sparse.topk), dtype=np.int32)
    contexts = []
    for row in range(batch):
        own = sets[row % len(sets)]
        spare = len(own.position) - n_steps
        start = int(rng.integers(spare + 1)) if row >= len(sets) else 0
        table[:, :, row] = own.ids[start : start + n_steps][:, layers][:, :, heads]
        contexts.append(int(own.position[start]) + 1)
    label = (
        f"sets of trace {trace.directory.name} ({model.name}, method {trace.meta.method}, {len(sets)} sequences), "
        f"layers by relative depth, heads in turn, rows with time offsets of seed {seed}"
    )
    return Injection(torch.from_numpy(table).to(device), label, contexts)
