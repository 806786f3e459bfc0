"""Registry of schedules: each is a rule in words, a SimPy model and its fast twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nosa_sys.errors import ConfigError
from nosa_sys.simulator.pipeline import Span, run_serial
from nosa_sys.simulator.recurrence import serial_times
from nosa_sys.simulator.step_times import StepCosts, StepTimes


@dataclass(frozen=True)
class Schedule:
    """``rule`` is printed with every prediction; ``simpy`` and ``recurrence`` give the same times."""

    name: str
    rule: str
    simpy: Callable[[StepCosts], tuple[StepTimes, list[list[Span]]]]
    recurrence: Callable[[StepCosts], StepTimes]


SCHEDULES: dict[str, Schedule] = {
    s.name: s
    for s in (
        Schedule(
            "serial",
            "serial: per layer host, select, fetch misses, attention, rest, one after another; finished blocks are "
            "written back beside it from the end of the layer's selection; the step ends when both have ended",
            run_serial,
            serial_times,
        ),
    )
}


def get_schedule(name: str) -> Schedule:
    """Look a schedule up; the error lists the ones that the simulator has."""
    if name not in SCHEDULES:
        raise ConfigError(f"schedule {name!r} has no model here; known: {', '.join(SCHEDULES)}")
    return SCHEDULES[name]
