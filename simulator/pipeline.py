"""The SimPy model of one decode step: a GPU compute stream and the two directions of the link.

All timed work goes through one `Clock`: it knows what is running, sets each rate by `simulator.rates.copy_rate`, and
sleeps until the first of them ends. Work starts only at such an end, so no timer is ever cancelled or left over.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from nosa_sys.simulator.invariants import require
from nosa_sys.simulator.rates import LinkSharing, copy_rate
from nosa_sys.simulator.step_times import StepCosts, StepTimes

# SimPy runs events of one instant by priority: the clock looks again only when every other event of it has run.
_AFTER_ALL = 2
IDLE, COMPUTE, H2D, D2H = "idle", "compute", "h2d", "d2h"

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
        rate = float(copy_rate(COMPUTE in kinds, H2D in kinds, D2H in kinds, self._sharing))
        return [rate if work.kind in (H2D, D2H) else 1.0 for work in self._running]

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
class Transfer:
    """A transfer posted to one direction of the link."""

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

    def post(self, layer: int, fixed_us: float, bytes_us: float, n_bytes: int) -> simpy.Event:
        """Queue a transfer; the event fires when its last byte has arrived."""
        transfer = Transfer(layer, fixed_us, bytes_us, n_bytes, self._clock.env.event())
        self._queue.put(transfer)
        return transfer.done

    def _run(self) -> Process:
        while True:
            transfer: Transfer = yield self._queue.get()
            start = self._clock.env.now
            yield self._clock.work(IDLE, transfer.fixed_us)
            yield self._clock.work(self._kind, transfer.bytes_us)
            self.end_us = self._clock.env.now
            self.busy_us += self.end_us - start
            self._spans.append(Span(self._kind, "copy", transfer.layer, start, self.end_us, transfer.n_bytes))
            transfer.done.succeed()


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
        self.gpu_end_us = 0.0

    def gpu(self, kind: str, name: str, layer: int, duration_us: float) -> Process:
        """A piece of the GPU stream: compute, or idle time that the host needs."""
        start = self.env.now
        yield self.clock.work(kind, duration_us)
        track = "gpu" if kind == COMPUTE else "host"
        self.spans.append(Span(track, name, layer, start, self.env.now))

    def run(self, stream: Process) -> None:
        """Run the GPU stream and every transfer that it posts to the end."""

        def to_the_end() -> Process:
            yield from stream
            self.gpu_end_us = self.env.now

        self.env.process(to_the_end())
        self.env.run()
        require(self.env.peek() == float("inf"), "events are left after the end of the step")


def serial_stream(machine: Machine, costs: StepCosts, row: int) -> Process:
    """The GPU stream of one serial step: every kernel waits for the one before, attention for its misses."""
    yield from machine.gpu(IDLE, "host", -1, costs.step_host_us[row])
    for layer in range(costs.n_layers):
        yield from machine.gpu(IDLE, "host", layer, costs.host_us[row, layer])
        yield from machine.gpu(COMPUTE, "select", layer, costs.select_us[row, layer])
        if costs.d2h_fixed_us[row, layer] + costs.d2h_us[row, layer] > 0:
            machine.d2h.post(
                layer, costs.d2h_fixed_us[row, layer], costs.d2h_us[row, layer], int(costs.d2h_bytes[row, layer])
            )
        if costs.h2d_fixed_us[row, layer] + costs.h2d_us[row, layer] > 0:
            yield machine.h2d.post(
                layer, costs.h2d_fixed_us[row, layer], costs.h2d_us[row, layer], int(costs.h2d_bytes[row, layer])
            )
        yield from machine.gpu(COMPUTE, "attention", layer, costs.attention_us[row, layer])
        yield from machine.gpu(COMPUTE, "gemm", layer, costs.gemm_us[row, layer])
    yield from machine.gpu(COMPUTE, "output head", -1, costs.tail_us[row])


def run_serial(costs: StepCosts) -> tuple[StepTimes, list[list[Span]]]:
    """Every instance through SimPy, one environment each. Returns times [n] and the spans of each."""
    machines = []
    for row in range(len(costs)):
        sharing = costs.rows(slice(row, row + 1)).sharing
        machine = Machine(LinkSharing(float(sharing.duplex_factor[0]), float(sharing.beside_compute_factor[0])))  # type: ignore[index]
        machine.run(serial_stream(machine, costs, row))
        machines.append(machine)
    gpu_end = np.array([m.gpu_end_us for m in machines])
    h2d_busy = np.array([m.h2d.busy_us for m in machines])
    d2h_end = np.array([m.d2h.end_us for m in machines])
    d2h_busy = np.array([m.d2h.busy_us for m in machines])
    d2h_exposed = np.maximum(0.0, d2h_end - gpu_end)
    gpu_spans = [_summed(m.spans) for m in machines]
    times = StepTimes(
        step_us=np.maximum(gpu_end, d2h_end),
        host_us=np.array([s["host"] for s in gpu_spans]),
        select_us=np.array([s["select"] for s in gpu_spans]),
        h2d_exposed_us=h2d_busy,
        h2d_hidden_us=np.zeros(len(costs)),
        attention_us=np.array([s["attention"] for s in gpu_spans]),
        gemm_us=np.array([s["gemm"] + s["output head"] for s in gpu_spans]),
        d2h_exposed_us=d2h_exposed,
        d2h_hidden_us=np.maximum(0.0, d2h_busy - d2h_exposed),
    )
    return times.check(costs), [m.spans for m in machines]


def _summed(spans: list[Span]) -> dict[str, float]:
    totals = {"host": 0.0, "select": 0.0, "attention": 0.0, "gemm": 0.0, "output head": 0.0, "copy": 0.0}
    for span in spans:
        totals[span.name] += span.end_us - span.start_us
    return totals
