"""A dictionary model of slots, ranks and load lists, and random steps that hold ``plan_slots`` against it.

The model knows nothing of the kernel's arrays: what is resident is a dictionary, and what was prefetched and never used
is a set, where the kernel has the parity of a rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from nosa_sys.kernels.set_difference import LoadList, SlotPlan

BLOCK = 3  # tokens of a block: betas alone have them here
UNTOUCHED = 777


@dataclass
class Head:
    """One (lane, KV head): slot -> block, slot -> rank, and the blocks brought on a guess that nobody used yet."""

    slots: dict[int, int] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    unused: set[int] = field(default_factory=set)

    def step(
        self, wanted: list[int], current: int, rank: int | None, n_slots: int, *, keep: bool, guess: bool
    ) -> tuple[list[tuple[int, int]], list[int], list[int]]:
        """Returns (loads as (block, slot) in ascending block, blocks that were at hand, victims' blocks wasted)."""
        need = {block for block in wanted if block >= 0}
        at_hand = [block for block in sorted(need) if block in self.slots.values() or block == current]
        if not keep:
            self.slots = {slot: block for slot, block in self.slots.items() if block in need}
        loads, wasted = [], []
        for block in sorted(need - set(self.slots.values())):
            empty = [slot for slot in range(n_slots) if slot not in self.slots]
            if empty:
                slot = empty[0]
            else:
                slot = min((s for s, held in self.slots.items() if held not in need), key=lambda s: (self.ranks[s], s))
                if self.slots[slot] in self.unused:
                    wasted.append(self.slots[slot])
                    self.unused.discard(self.slots[slot])
            self.slots[slot] = block
            if block != current:
                loads.append((block, slot))
        arrived = {block for block, _ in loads}
        for slot, block in self.slots.items():
            if rank is not None and (block in arrived or (block in need and not guess)):
                self.ranks[slot] = rank
        self.unused = self.unused | arrived if guess else self.unused - need
        return loads, at_hand, wasted


@dataclass
class Sizes:
    """A run: lanes and heads, wanted blocks, guesses behind them, slots; ``keep``: unwanted blocks stay."""

    n_lanes: int
    n_heads: int
    k: int
    n_guesses: int
    n_slots: int
    keep: bool
    paged: bool
    wide_split: bool


class Run:
    """One random history: the tensors that ``plan_slots`` works on, and the model beside them."""

    def __init__(self, sizes: Sizes, seed: int, plan_slots: Callable[..., SlotPlan], *, row_major: bool) -> None:
        self.sizes, self.plan_slots, self.row_major = sizes, plan_slots, row_major
        self.random = random.Random(seed)
        self.n_wasted = 0
        n_rows, self.n_blocks = sizes.n_lanes * sizes.n_heads, 3 * sizes.n_slots
        self.heads = [Head() for _ in range(n_rows)]
        generator = torch.Generator().manual_seed(seed)
        self.map = torch.full((n_rows, sizes.n_slots), -1, dtype=torch.int32)
        self.ranks = torch.full((n_rows, sizes.n_slots + 1), -1)  # one column more, as the engine's has
        for head in self.heads:
            head.ranks = dict.fromkeys(range(sizes.n_slots), -1)
        self.pages = torch.randperm(sizes.n_lanes * self.n_blocks, generator=generator).view(sizes.n_lanes, -1)
        self.pages[torch.rand(self.pages.shape, generator=generator) < 0.1] = -1
        self.bases = torch.randint(0, 1000, (n_rows + sizes.n_heads,), generator=generator)
        self.token_betas = torch.rand((n_rows, self.n_blocks, BLOCK), generator=generator)
        self.slot_betas = torch.full((n_rows * sizes.n_slots, BLOCK), torch.nan)

    def step(self, step: int) -> None:
        """A demand call and, where blocks are kept, the prefetch behind it; one lane of padding among the real ones."""
        s = self.sizes
        lanes = self.random.sample(range(s.n_lanes), s.n_lanes - 1)
        lanes.insert(self.random.randrange(s.n_lanes), -1)
        self.row_heads = [lane * s.n_heads + h if lane >= 0 else -1 for lane in lanes for h in range(s.n_heads)]
        newest = min(s.k + step, self.n_blocks) - 1
        current = [self.random.choice((newest, newest, -1)) for _ in self.row_heads]
        chosen = [self._wanted(newest, now) for now in current]
        self._call(chosen, current, 2 * step + 1, guess=False)
        if s.keep and s.n_guesses:
            guesses = [row + self._guesses(row, newest) for row in chosen]
            self._call(guesses, current, 2 * step, guess=True)

    def _wanted(self, newest: int, current: int) -> list[int]:
        """k entries: distinct blocks, the current one among them, some of them repeated or padding."""
        count = self.random.randint(0, self.sizes.k)
        picks = self.random.sample(range(newest + 1), min(count, newest + 1))
        if current >= 0 and current not in picks:
            picks = [*picks[: self.sizes.k - 1], current]
        while picks and len(picks) < self.sizes.k and self.random.random() < 0.3:
            picks.append(self.random.choice(picks))
        picks += [-1] * (self.sizes.k - len(picks))
        self.random.shuffle(picks)
        return picks

    def _guesses(self, row: list[int], newest: int) -> list[int]:
        others = [block for block in range(newest + 1) if block not in row]
        picks = self.random.sample(others, min(len(others), self.random.randint(0, self.sizes.n_guesses)))
        return picks + [-1] * (self.sizes.n_guesses - len(picks))

    def _call(self, wanted: list[list[int]], current: list[int], rank: int, *, guess: bool) -> None:
        s, n_rows, width = self.sizes, len(wanted), len(wanted[0])
        held = self.random.randint(0, 3)  # what an earlier call left in the list
        capacity = n_rows * width + held
        lists = [torch.full((capacity,), UNTOUCHED) for _ in range(2)]
        loads = LoadList(lists[0], lists[1], torch.tensor([held], dtype=torch.int32))
        before = [set(head.slots.values()) for head in self.heads]
        expected = self._expect(wanted, current, rank if s.keep else None, guess)
        most = max(1, max(len(row["loads"]) for row in expected))
        split = width if s.wide_split else most
        plan = self.plan_slots(
            self.map,
            torch.tensor(wanted, dtype=torch.int32),
            self.ranks,
            s.keep,
            loads,
            row_heads=torch.tensor(self.row_heads),
            current_blocks=torch.tensor(current, dtype=torch.int32),
            page_table=self.pages if s.paged else None,
            n_kv_heads=s.n_heads,
            host_row_base=None if s.paged else self.bases,
            use_step=torch.tensor([rank]) if s.keep else None,
            touch="loads" if guess else "wanted",
            token_betas=self.token_betas,
            slot_betas=self.slot_betas,
            split=split,
            count_wasted=s.keep,
        )
        self._check_state()
        for row, want in enumerate(expected):
            self._check_row(plan, row, want, wanted[row], split)
        pairs = [pair for want in expected for pair in want["pairs"]]
        got = list(zip(lists[0].tolist(), lists[1].tolist(), strict=True))
        assert loads.count.item() == held + len(pairs)
        listed = got[held : held + len(pairs)]
        assert listed == pairs if self.row_major else sorted(listed) == sorted(pairs)
        assert got[:held] + got[held + len(pairs) :] == [(UNTOUCHED, UNTOUCHED)] * (capacity - len(pairs))
        if guess:  # what the demand call has made resident hits, and stays
            for row, head in enumerate(self.row_heads):
                if head >= 0:
                    demanded = {block for block in wanted[row][: s.k] if block >= 0}
                    assert demanded <= before[head] & set(self.heads[head].slots.values())
                    assert all(block not in demanded for block, _ in expected[row]["loads"])

    def _expect(self, wanted: list[list[int]], current: list[int], rank: int | None, guess: bool) -> list[dict]:
        s, rows = self.sizes, []
        for row, head in enumerate(self.row_heads):
            if head < 0:
                rows.append({"head": -1, "loads": [], "at_hand": [], "wasted": [], "pairs": [], "current": -1})
                continue
            model = self.heads[head]
            loads, at_hand, wasted = model.step(wanted[row], current[row], rank, s.n_slots, keep=s.keep, guess=guess)
            self.n_wasted += len(wasted)
            pairs = []
            for block, slot in loads:
                page = int(self.pages[head // s.n_heads, block])
                host_row = page * s.n_heads + head % s.n_heads if page >= 0 else -1
                pairs.append((host_row if s.paged else int(self.bases[row]) + block, head * s.n_slots + slot))
            rows.append(
                {
                    "head": head,
                    "loads": loads,
                    "at_hand": at_hand,
                    "wasted": wasted,
                    "pairs": pairs,
                    "current": current[row],
                }
            )
        return rows

    def _check_state(self) -> None:
        """Maps, ranks and betas of every head, those of lanes that did not run included."""
        n_slots = self.sizes.n_slots
        for head, model in enumerate(self.heads):
            assert self.map[head].tolist() == [model.slots.get(slot, -1) for slot in range(n_slots)]
            assert self.ranks[head].tolist() == [*(model.ranks[slot] for slot in range(n_slots)), -1]

    def _check_row(self, plan: SlotPlan, row: int, want: dict, wanted: list[int], split: int) -> None:
        head, n_slots = want["head"], self.sizes.n_slots
        slot_of = {b: slot for slot, b in self.heads[head].slots.items()} if head >= 0 else {}
        slots = [slot_of.get(block, -1) for block in wanted]
        rows = [head * n_slots + slot if slot >= 0 else -1 for slot in slots]
        assert plan.wanted_slots[row].tolist() == slots
        assert plan.slot_rows[row].tolist() == rows
        assert plan.n_loads[row].item() == len(want["loads"])
        assert plan.hit_rows is not None
        assert plan.miss_rows is not None
        assert plan.miss_ids is not None
        hits = [at if block in want["at_hand"] else -1 for block, at in zip(wanted, rows, strict=True)]
        assert plan.hit_rows[row].tolist() == hits
        at_current = [at for block, at in zip(wanted, rows, strict=True) if block == want["current"] and block >= 0]
        assert plan.current_rows[row].item() == (at_current[0] if at_current else -1)
        padding = [-1] * (split - len(want["loads"]))
        assert plan.miss_ids[row].tolist() == [block for block, _ in want["loads"]] + padding
        assert plan.miss_rows[row].tolist() == [head * n_slots + slot for _, slot in want["loads"]] + padding
        if self.sizes.keep:
            assert plan.n_wasted is not None
            assert plan.n_wasted[row].item() == len(want["wasted"])
        for block, slot in want["loads"]:
            assert torch.equal(self.slot_betas[head * n_slots + slot], self.token_betas[head, block])


SIZES = (
    Sizes(n_lanes=3, n_heads=2, k=4, n_guesses=2, n_slots=6, keep=True, paged=True, wide_split=False),
    Sizes(n_lanes=3, n_heads=1, k=3, n_guesses=3, n_slots=8, keep=True, paged=False, wide_split=True),
    Sizes(n_lanes=2, n_heads=3, k=5, n_guesses=0, n_slots=5, keep=False, paged=True, wide_split=False),
    Sizes(n_lanes=2, n_heads=1, k=1, n_guesses=1, n_slots=2, keep=True, paged=True, wide_split=False),
)


def check_history(
    sizes: Sizes, seed: int, n_steps: int, plan_slots: Callable[..., SlotPlan], *, row_major: bool
) -> int:
    """Run ``n_steps`` steps against the model; returns how many prefetched blocks were wasted."""
    run = Run(sizes, seed, plan_slots, row_major=row_major)
    for step in range(n_steps):
        run.step(step)
    return run.n_wasted
