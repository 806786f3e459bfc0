"""A program as numpy over many step instances at once: the fast path of sweeps.

Where nothing shares its rate the times have a closed form (a max-plus recurrence over pieces and transfers);
elsewhere a small event loop advances all instances together, each to its own next event.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nosa_sys.simulator.invariants import require
from nosa_sys.simulator.program import D2H, H2D, HOST, PARTS, Piece, Program, Transfer
from nosa_sys.simulator.rates import LinkSharing, shared_rates
from nosa_sys.simulator.step_times import Floats, Ints, StepTimes

# Instances that should be run together: the working arrays then stay in the processor's cache.
CHUNK = 4096
_WAITING = len(PARTS)  # the part to which time counts while the GPU stream waits for a fetch
_DONE = len(PARTS) + 1
_NEVER = 2**30


def run_program(program: Program) -> StepTimes:
    """Times of every instance; the rules are those of `simulator.pipeline`."""
    run = _Run.of(program.n)
    alone = np.broadcast_to(program.sharing.shares_nothing, program.n)
    if program.waits_for_every_fetch():
        alone = alone | (program.alone_us(D2H) == 0.0)
    if alone.all():
        _closed_form(program, run)
    elif alone.any():
        _closed_form(program, run)
        run.put(np.flatnonzero(~alone), _event_loop(_Lanes.of(program, ~alone)))
    else:
        run = _event_loop(_Lanes.of(program, ~alone))
    return StepTimes.of_run(
        dict(zip(PARTS, run.spent_us, strict=False)),
        waited_us=run.spent_us[_WAITING],
        gpu_end_us=run.gpu_end_us,
        h2d_end_us=run.h2d_end_us,
        h2d_busy_us=run.h2d_busy_us,
        d2h_end_us=run.d2h_end_us,
        d2h_busy_us=run.d2h_busy_us,
    ).check(program.alone_us(H2D), program.alone_us(D2H))


@dataclass
class _Run:
    """Outcome of n instances: ``spent_us`` [part and waiting and done, n], the others [n]."""

    spent_us: Floats
    gpu_end_us: Floats
    h2d_end_us: Floats
    h2d_busy_us: Floats
    d2h_end_us: Floats
    d2h_busy_us: Floats

    @classmethod
    def of(cls, n: int) -> _Run:
        return cls(np.zeros((_DONE + 1, n)), *(np.zeros(n) for _ in range(5)))

    def put(self, rows: Ints, other: _Run) -> None:
        """Take the outcome of some rows from another run."""
        for name, values in vars(self).items():
            values[..., rows] = getattr(other, name)


def _closed_form(program: Program, run: _Run) -> None:
    """All at full speed: a piece starts when the one before and its fetch have ended, transfers run in order."""
    now, ends = run.gpu_end_us, {H2D: run.h2d_end_us, D2H: run.d2h_end_us}
    busy = {H2D: run.h2d_busy_us, D2H: run.d2h_busy_us}
    arrivals: dict[Transfer, Floats] = {}
    for op in program.operations:
        if isinstance(op, Piece):
            if op.after is not None:
                waited = np.maximum(0.0, np.where(op.after.posted, arrivals[op.after] - now, 0.0))
                run.spent_us[_WAITING] += waited
                now += waited
            run.spent_us[PARTS.index(op.part)] += op.us
            now += op.us
        else:
            end, work = ends[op.direction], op.fixed_us + op.bytes_us
            end[:] = np.where(op.posted, np.maximum(end, now) + work, end)
            busy[op.direction] += work
            arrivals[op] = end.copy()


@dataclass
class _Lane:
    """One of the three rows of pieces that run one after another.

    ``work_us`` [n, length + 1] ends with a zero. ``kind`` [length + 1] says what a piece is, ``opens`` when it may
    start: the number of pieces (GPU: of fetch stages, [n, length + 1]) that must lie behind. ``jump`` [n, length + 1]
    leads from a piece to the first from there on that takes time or waits.
    """

    work_us: Floats
    kind: NDArray[np.int64]
    opens: Ints
    jump: NDArray[np.int32]

    @classmethod
    def of(cls, work: list[Floats], kind: list[int], opens: list[Ints] | list[int], end_kind: int, n: int) -> _Lane:
        work_us = np.stack([*work, np.zeros(n)], axis=1)
        gates = np.stack([*opens, np.full(n, _NEVER)], axis=1) if opens and isinstance(opens[0], np.ndarray) else None
        counts = work_us > 0
        if gates is not None:
            counts = counts | (gates > 0)
        counts[:, -1] = True
        own = np.where(counts, np.arange(len(work) + 1, dtype=np.int32), np.int32(len(work)))
        jump = np.minimum.accumulate(own[:, ::-1], axis=1)[:, ::-1]
        return cls(
            work_us,
            np.array([*kind, end_kind]),
            np.array([*opens, _NEVER]) if gates is None else gates,
            np.ascontiguousarray(jump),
        )


@dataclass
class _Lanes:
    """A program as three lanes: the GPU stream, and for each direction of the link the stages of its transfers."""

    gpu: _Lane
    h2d: _Lane
    d2h: _Lane
    sharing: LinkSharing
    n: int

    @classmethod
    def of(cls, program: Program, rows: NDArray[np.bool_]) -> _Lanes:
        n = int(rows.sum())
        work: dict[str, list[Floats]] = {"gpu": [], H2D: [], D2H: []}
        kind: dict[str, list[int]] = {"gpu": [], H2D: [], D2H: []}
        waits: list[Ints] = []
        posted: dict[str, list[int]] = {H2D: [], D2H: []}
        arrived: dict[Transfer, int] = {}
        for op in program.operations:
            if isinstance(op, Piece):
                work["gpu"].append(op.us[rows])
                kind["gpu"].append(PARTS.index(op.part))
                waits.append(
                    np.zeros(n, dtype=np.int64)
                    if op.after is None
                    else np.where(op.after.posted[rows], arrived[op.after], 0)
                )
            else:
                work[op.direction] += [op.fixed_us[rows], op.bytes_us[rows]]
                kind[op.direction] += [0, 1]
                posted[op.direction] += [len(waits)] * 2
                arrived[op] = len(work[op.direction])
        sharing = LinkSharing(
            *(
                np.broadcast_to(np.asarray(factor, dtype=np.float64), program.n)[rows]
                for factor in vars(program.sharing).values()
            )
        )
        return cls(
            _Lane.of(work["gpu"], kind["gpu"], waits, _DONE, n),
            _Lane.of(work[H2D], kind[H2D], posted[H2D], 0, n),
            _Lane.of(work[D2H], kind[D2H], posted[D2H], 0, n),
            sharing,
            n,
        )


class _Cursor:
    """Where every instance stands on one lane: piece ``at`` [n] with ``left_us`` of work at full speed."""

    def __init__(self, lane: _Lane, n: int) -> None:
        self._width = lane.work_us.shape[1]
        self._work, self._jump = lane.work_us.reshape(-1), lane.jump.reshape(-1)
        self._opens, self._kinds = lane.opens.reshape(-1), lane.kind
        self._per_row = lane.opens.ndim == 2
        self._base = np.arange(n) * self._width
        self.at, self.left_us = np.zeros(n, dtype=np.int64), np.zeros(n)
        self.opens, self.kind = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
        self.move_to(np.arange(n), self.at)

    def move_to(self, rows: Ints, at: Ints) -> None:
        """Put some instances at a piece, or the first after it that takes time or waits."""
        base = self._base[rows]
        at = self._jump[base + at]
        flat = base + at
        self.at[rows] = at
        self.left_us[rows] = self._work[flat]
        self.opens[rows] = self._opens[flat if self._per_row else at]
        self.kind[rows] = self._kinds[at]

    def advance(self, running: NDArray[np.bool_], own_wait: Floats, wait: Floats, done_us: Floats) -> Ints:
        """Take ``done_us`` of work off; instances whose piece ends now go on. Returns these."""
        self.left_us -= np.where(running, done_us, 0.0)
        np.maximum(self.left_us, 0.0, out=self.left_us)
        rows = np.flatnonzero(own_wait <= wait)
        self.move_to(rows, self.at[rows] + 1)
        return rows

    @property
    def at_end(self) -> bool:
        return bool(np.all(self.at == self._width - 1))


def _event_loop(lanes: _Lanes) -> _Run:
    """Where copies and compute slow one another."""
    n, sharing = lanes.n, lanes.sharing
    run = _Run.of(n)
    gpu, h2d, d2h = (_Cursor(lane, n) for lane in (lanes.gpu, lanes.h2d, lanes.d2h))
    host = PARTS.index(HOST)
    spent, own_row, now = run.spent_us.reshape(-1), np.arange(n), np.zeros(n)
    while True:
        gpu_on, h2d_on, d2h_on = h2d.at >= gpu.opens, gpu.at >= h2d.opens, gpu.at >= d2h.opens
        if not (gpu_on | h2d_on | d2h_on).any():
            require(gpu.at_end and h2d.at_end and d2h.at_end, "a step stands still before its end")
            return run
        computes = gpu_on & (gpu.kind != host)
        fetches, writes = h2d_on & (h2d.kind == 1), d2h_on & (d2h.kind == 1)
        copy, compute = shared_rates(computes, fetches, writes, sharing)
        gpu_rate, h2d_rate, d2h_rate = (
            np.where(on, rate, 1.0) for on, rate in ((computes, compute), (fetches, copy), (writes, copy))
        )
        gpu_wait = np.where(gpu_on, gpu.left_us / gpu_rate, np.inf)
        h2d_wait = np.where(h2d_on, h2d.left_us / h2d_rate, np.inf)
        d2h_wait = np.where(d2h_on, d2h.left_us / d2h_rate, np.inf)
        wait = np.minimum(np.minimum(gpu_wait, h2d_wait), d2h_wait)
        wait = np.where(np.isfinite(wait), wait, 0.0)
        now += wait
        part = np.where(gpu_on | (gpu.kind == _DONE), gpu.kind, _WAITING)
        spent[part * n + own_row] += wait
        run.h2d_busy_us += np.where(h2d_on, wait, 0.0)
        run.d2h_busy_us += np.where(d2h_on, wait, 0.0)
        for cursor, running, own_wait, rate, ends in (
            (gpu, gpu_on, gpu_wait, gpu_rate, run.gpu_end_us),
            (h2d, h2d_on, h2d_wait, h2d_rate, run.h2d_end_us),
            (d2h, d2h_on, d2h_wait, d2h_rate, run.d2h_end_us),
        ):
            rows = cursor.advance(running, own_wait, wait, wait * rate)
            ends[rows] = now[rows]
