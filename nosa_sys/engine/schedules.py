"""Schedules: in which order a layer's transfers and attention run. All give the same tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor

from nosa_sys.errors import ConfigError


class LayerWork(Protocol):
    """The two halves of a planned layer that a schedule may order."""

    def fetch(self) -> None:
        """Bring the missed blocks from the host pool into their slots."""

    def attend(self) -> Tensor:
        """Attention over the selected slots, [batch, q_head, head_dim]; every selected block must be resident."""


class Schedule(ABC):
    """Base of all schedules; variants are entries of SCHEDULES."""

    name: str

    @abstractmethod
    def run(self, work: LayerWork) -> Tensor:
        """Run one layer's launches and return its attention output."""


class SerialSchedule(Schedule):
    """Every miss arrives before attention starts."""

    name = "serial"

    def run(self, work: LayerWork) -> Tensor:
        work.fetch()
        return work.attend()


SCHEDULES: dict[str, Schedule] = {s.name: s for s in (SerialSchedule(),)}


def get_schedule(name: str) -> Schedule:
    """Look a schedule up; the error lists the known ones."""
    if name not in SCHEDULES:
        raise ConfigError(f"unknown schedule {name!r} for an engine; known: {', '.join(SCHEDULES)}")
    return SCHEDULES[name]
