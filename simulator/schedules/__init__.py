"""Registry of schedules: each is a rule in words, its costs, and the program of a step."""

from __future__ import annotations

import dataclasses
from typing import Any

from nosa_sys.errors import ConfigError
from nosa_sys.simulator.schedules.base import Schedule
from nosa_sys.simulator.schedules.one_stream import FusedKv, Serial
from nosa_sys.simulator.schedules.prefetch import Prefetch
from nosa_sys.simulator.schedules.split_merge import SplitMerge
from nosa_sys.simulator.schedules.two_batch import TwoBatch

SCHEDULES: dict[str, Schedule] = {s.name: s for s in (Serial(), FusedKv(), SplitMerge(), TwoBatch(), Prefetch())}


def get_schedule(name: str, *, prefetch_blocks: int | None = None, prefetch_hit_share: float | None = None) -> Schedule:
    """Look a schedule up; the error lists the ones that the simulator has. The guess belongs to prefetch alone."""
    if name not in SCHEDULES:
        raise ConfigError(f"schedule {name!r} has no model here; known: {', '.join(SCHEDULES)}")
    schedule = SCHEDULES[name]
    given = {"n_blocks": prefetch_blocks, "hit_share": prefetch_hit_share}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if not changes:
        return schedule
    if not isinstance(schedule, Prefetch):
        raise ConfigError(f"prefetch_blocks and prefetch_hit_share need schedule prefetch, not {name!r}")
    return dataclasses.replace(schedule, **changes)
