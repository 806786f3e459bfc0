"""The SimPy model of one decode step: a GPU stream and the two directions of the link.

All timed work goes through one `Clock`: it knows what is running, sets each rate by `simulator.rates.shared_rates`,
and sleeps until the first of them ends. Work starts only at such an end, so no timer is ever cancelled or left over.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from nosa_sys.simulator.invariants import require
from nosa_sys.simulator.program import D2H, H2D, HOST, PARTS, Piece, Program, Transfer
from nosa_sys.simulator.rates import LinkSharing, shared_rates
from nosa_sys.simulator.step_times import StepTimes

# SimPy runs events of one instant by priority: the clock looks again only when every other event of it has run.
_AFTER_ALL = 2
IDLE, COMPUTE = "idle", "compute"

Process = Generator[simpy.Event, Any, None]


@dataclass(frozen=True)
class Span:
    """One piece of work that ran, for timelines. ``n_bytes`` is 0 for anything but transfers."""

    track: str
    name: str
    layer: int
    start_us: float
    end_us: float
    n_bytes: int = 0


@dataclass
class _Work:
    kind: str
    left_us: float
    done: simpy.Event


class Clock:
    """Advances all running work; ``left_us`` is work in microseconds at full speed."""

    def __init__(self, env: simpy.Environment, sharing: LinkSharing) -> None:
        self.env = env
        self._sharing = sharing
        self._running: list[_Work] = []
        self._wake: simpy.Event | None = None
        env.process(self._run())

    def work(self, kind: str, duration_us: float) -> simpy.Event:
        """An event that fires when this much work is done; the kind decides what slows it."""
        work = _Work(kind, float(duration_us), self.env.event())
        self._running.append(work)
        if self._wake is not None and not self._wake.triggered:
            self._wake.succeed()
        return work.done

    def _settled(self) -> simpy.Event:
        event = simpy.Event(self.env)
        event._ok, event._value = True, None
        self.env.schedule(event, priority=_AFTER_ALL)  # type: ignore[arg-type]
        return event

    def _rates(self) -> list[float]:
        kinds = {work.kind for work in self._running}
        copy, compute = shared_rates(COMPUTE in kinds, H2D in kinds, D2H in kinds, self._sharing)
        rates = {IDLE: 1.0, COMPUTE: float(compute), H2D: float(copy), D2H: float(copy)}
        return [rates[work.kind] for work in self._running]

    def _run(self) -> Process:
        while True:
            yield self._settled()
            if not self._running:
                self._wake = self.env.event()
                yield self._wake
                continue
            rates = self._rates()
            waits = [work.left_us / rate for work, rate in zip(self._running, rates, strict=True)]
            wait = min(waits)
            require(wait >= 0, f"negative wait of {wait} us")
            yield self.env.timeout(wait)
            running, self._running = self._running, []
            for work, rate, own_wait in zip(running, rates, waits, strict=True):
                work.left_us = max(0.0, work.left_us - wait * rate)
                if own_wait <= wait:
                    work.done.succeed()
                else:
                    self._running.append(work)


@dataclass
class _Posted:
    name: str
    layer: int
    fixed_us: float
    bytes_us: float
    n_bytes: int
    done: simpy.Event


class LinkDirection:
    """One direction of the link: transfers run one after another in the order in which they were posted."""

    def __init__(self, clock: Clock, kind: str, spans: list[Span]) -> None:
        self._clock, self._kind, self._spans = clock, kind, spans
        self._queue: simpy.Store = simpy.Store(clock.env)
        self.busy_us = 0.0
        self.end_us = 0.0
        clock.env.process(self._run())

    def post(self, layer: int, fixed_us: float, bytes_us: float, n_bytes: int, name: str = "copy") -> simpy.Event:
        """Queue a transfer; the event fires when its last byte has arrived."""
        posted = _Posted(name, layer, fixed_us, bytes_us, n_bytes, self._clock.env.event())
        self._queue.put(posted)
        return posted.done

    def _run(self) -> Process:
        while True:
            posted: _Posted = yield self._queue.get()
            start = self._clock.env.now
            yield self._clock.work(IDLE, posted.fixed_us)
            yield self._clock.work(self._kind, posted.bytes_us)
            self.end_us = self._clock.env.now
            self.busy_us += self.end_us - start
            self._spans.append(Span(self._kind, posted.name, posted.layer, start, self.end_us, posted.n_bytes))
            posted.done.succeed()


@dataclass
class Machine:
    """One GPU stream and its link for one step; ``spans`` collects what ran."""

    sharing: LinkSharing
    env: simpy.Environment = field(default_factory=simpy.Environment)
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = Clock(self.env, self.sharing)
        self.h2d = LinkDirection(self.clock, H2D, self.spans)
        self.d2h = LinkDirection(self.clock, D2H, self.spans)
        self.part_us = dict.fromkeys(PARTS, 0.0)
        self.waited_us = 0.0
        self.gpu_end_us = 0.0

    def gpu(self, part: str, name: str, layer: int, duration_us: float) -> Process:
        """A piece of the GPU stream: compute, or idle time that the host needs."""
        start = self.env.now
        yield self.clock.work(IDLE if part == HOST else COMPUTE, duration_us)
        self.part_us[part] += self.env.now - start
        self.spans.append(Span("host" if part == HOST else "gpu", name, layer, start, self.env.now))

    def stream(self, program: Program, row: int) -> Process:
        """The GPU stream of one instance of a program."""
        arrivals: dict[Transfer, simpy.Event] = {}
        for op in program.operations:
            if isinstance(op, Piece):
                if op.after in arrivals:
                    begin = self.env.now
                    yield arrivals[op.after]
                    self.waited_us += self.env.now - begin
                yield from self.gpu(op.part, op.name, op.layer, op.us[row])
            elif op.posted[row]:
                direction = self.h2d if op.direction == H2D else self.d2h
                arrivals[op] = direction.post(
                    op.layer, op.fixed_us[row], op.bytes_us[row], int(op.n_bytes[row]), op.name
                )

    def run(self, stream: Process) -> None:
        """Run the GPU stream and every transfer that it posts to the end."""

        def to_the_end() -> Process:
            yield from stream
            self.gpu_end_us = self.env.now

        self.env.process(to_the_end())
        self.env.run()
        require(self.env.peek() == float("inf"), "events are left after the end of the step")


def run_program(program: Program) -> tuple[StepTimes, list[list[Span]]]:
    """Every instance through SimPy, one environment each. Returns times [n] and the spans of each."""
    machines = []
    factors = [
        np.broadcast_to(np.asarray(factor, dtype=np.float64), program.n)
        for factor in (
            program.sharing.duplex_factor,
            program.sharing.beside_compute_factor,
            program.sharing.compute_beside_copy_factor,
        )
    ]
    for row in range(program.n):
        machine = Machine(LinkSharing(*(float(factor[row]) for factor in factors)))
        machine.run(machine.stream(program, row))
        machines.append(machine)
    times = StepTimes.of_run(
        {part: np.array([m.part_us[part] for m in machines]) for part in PARTS},
        waited_us=np.array([m.waited_us for m in machines]),
        gpu_end_us=np.array([m.gpu_end_us for m in machines]),
        h2d_end_us=np.array([m.h2d.end_us for m in machines]),
        h2d_busy_us=np.array([m.h2d.busy_us for m in machines]),
        d2h_end_us=np.array([m.d2h.end_us for m in machines]),
        d2h_busy_us=np.array([m.d2h.busy_us for m in machines]),
    )
    return times.check(program.alone_us(H2D), program.alone_us(D2H)), [m.spans for m in machines]
