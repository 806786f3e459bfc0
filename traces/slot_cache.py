"""Slot caches of all streams at once: which blocks are resident after each step, and what each step loads."""

from __future__ import annotations

import numpy as np

from nosa_sys.errors import CapacityError
from nosa_sys.traces.policies import EvictionPolicy
from nosa_sys.traces.reuse import NEVER, BlockUses

_EMPTY, _UNWANTED, _WANTED = range(3)


class SlotCache:
    """``n_slots`` device slots for each stream (one layer, sequence and KV head), run over recorded selections.

    Blocks are the numbers of `BlockUses` (one for each distinct block of each stream). ``slot_blocks``,
    ``last_use`` and ``next_use`` are ``[stream, slot]``; an empty slot holds block -1. ``pooled_betas`` is ``[block]``.
    """

    def __init__(
        self,
        uses: BlockUses,
        *,
        slots: int,
        policy: EvictionPolicy,
        block_size: int,
        pooled_betas: np.ndarray | None = None,
        current_in_first_slot: bool = True,
    ) -> None:
        """``current_in_first_slot``: a partial current block occupies slot 0 when prefill ends (the engine's rule);
        otherwise it is placed with the rest of the first selection, in ascending id."""
        widest = int(uses.rows.n_selected.max(initial=0))
        if slots < widest:
            raise CapacityError(f"slots={slots} cannot hold the {widest} blocks that one step needs; give >= {widest}")
        # more slots than a stream has blocks change nothing, and would only cost memory
        self.n_slots = max(1, min(slots, int(np.diff(uses.first_block).max(initial=0))))
        self._uses = uses
        self._policy = policy
        self._width = widest
        self._current = uses.rows.position.astype(np.int64) // block_size
        shape = (uses.streams.n_streams, self.n_slots)
        self.slot_blocks = np.full(shape, -1, dtype=np.int64)
        self.last_use = np.full(shape, -1, dtype=np.int64)
        self.next_use = np.full(shape, NEVER)
        self.pooled_betas = np.zeros(0) if pooled_betas is None else pooled_betas
        self._slot_of = np.full(uses.n_blocks + 1, -1, dtype=np.int64)  # the last entry serves padding
        if current_in_first_slot:
            self._seat_partial_current(block_size)

    def _seat_partial_current(self, block_size: int) -> None:
        first_rows = self._uses.streams.first
        partial = self._uses.rows.position[first_rows] % block_size != 0
        entry_is_current = self._uses.rows.block_ids == self._current[self._uses.row]
        entries = np.flatnonzero(entry_is_current & (self._uses.streams.time[self._uses.row] == 0))
        streams = self._uses.streams.stream[self._uses.row[entries]]
        entries, streams = entries[partial[streams]], streams[partial[streams]]
        self.slot_blocks[streams, 0] = self._uses.block[entries]
        self._slot_of[self._uses.block[entries]] = 0

    def run(self) -> np.ndarray:
        """Serve every row in time order; returns which entries of the sorted rows were misses, bool ``[entry]``.

        A miss is a block of G that was not resident, the current block left out: that one is born on the device.
        """
        streams = self._uses.streams
        lengths = streams.lengths
        loaded = np.zeros(len(self._uses.row), dtype=np.bool_)
        for time in range(int(lengths.max(initial=0))):
            active = np.flatnonzero(lengths > time)
            loaded[self._serve(active, streams.first[active] + time, time)] = True
        return loaded

    def _serve(self, active: np.ndarray, rows: np.ndarray, time: int) -> np.ndarray:
        offsets = self._uses.rows.offsets
        column = np.arange(self._width)
        wanted = column[None, :] < (offsets[rows + 1] - offsets[rows])[:, None]
        entry = np.where(wanted, offsets[rows][:, None] + column, 0)
        block = np.where(wanted, self._uses.block[entry], self._uses.n_blocks)
        load = wanted & (self._slot_of[block] < 0)
        if not self._policy.keep_unwanted:
            self._drop_unwanted(active, block, wanted)
        loading = np.flatnonzero(load.any(axis=1))
        if len(loading):
            self._place(active[loading], block[loading], load[loading], wanted[loading])
        row_index, column_index = np.nonzero(wanted)
        slot = self._slot_of[block[row_index, column_index]]
        self.last_use[active[row_index], slot] = time
        self.next_use[active[row_index], slot] = self._uses.following[entry[row_index, column_index]]
        return entry[load & (self._uses.rows.block_ids[entry] != self._current[rows][:, None])]

    def _wanted_slots(self, block: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """bool ``[stream, slot]``: slots that hold a wanted block already."""
        held = np.zeros((len(block), self.n_slots), dtype=np.bool_)
        slot = self._slot_of[block]
        row_index, column_index = np.nonzero(wanted & (slot >= 0))
        held[row_index, slot[row_index, column_index]] = True
        return held

    def _drop_unwanted(self, active: np.ndarray, block: np.ndarray, wanted: np.ndarray) -> None:
        residents = self.slot_blocks[active]
        drop = (residents >= 0) & ~self._wanted_slots(block, wanted)
        self._slot_of[residents[drop]] = -1
        self.slot_blocks[active] = np.where(drop, -1, residents)

    def _place(self, active: np.ndarray, block: np.ndarray, load: np.ndarray, wanted: np.ndarray) -> None:
        """The r-th load in ascending id takes the r-th free slot: empty ones first, then victims by (rank, slot)."""
        residents = self.slot_blocks[active]
        kind = np.where(residents < 0, _EMPTY, _UNWANTED)
        kind[self._wanted_slots(block, wanted)] = _WANTED
        rank = np.where(kind == _UNWANTED, self._policy.rank(self, active), 0)
        free = np.lexsort((rank, kind), axis=-1)
        row_index, column_index = np.nonzero(load)
        ordinal = (np.cumsum(load, axis=1) - 1)[row_index, column_index]
        slot = free[row_index, ordinal]
        victim = residents[row_index, slot]
        self._slot_of[victim[victim >= 0]] = -1
        loaded = block[row_index, column_index]
        self.slot_blocks[active[row_index], slot] = loaded
        self._slot_of[loaded] = slot
