"""Slot counts as people write them: a number of blocks, or a multiple of topk."""

from __future__ import annotations

import math

from nosa_sys.errors import ConfigError

# Fastest at equal GPU bytes of 1, 1.25, 1.5 and 2 x k, for NOSA and InfLLMv2 on recorded sets (H200, docs/LOG.md).
GPU_SLOT_FACTOR = 1.25


def default_slots(topk: int, runner: str) -> int:
    """Slots where nobody says: k, and on a GPU, whose transfers cost time, a hot buffer beside them.

    >>> default_slots(64, "eager"), default_slots(64, "graph")
    (64, 80)
    """
    return slots_of(GPU_SLOT_FACTOR, topk) if runner == "graph" else topk


def slots_of(value: int | float | str, topk: int) -> int:
    """Slots from a whole number of blocks (80, "80") or a multiple of topk (1.25, "1.25x"), rounded up.

    ConfigError for anything else.

    >>> slots_of(80, 64), slots_of("80", 64), slots_of(1.25, 64), slots_of("2x", 64)
    (80, 80, 80, 128)
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lstrip("-").isdecimal() and len(value) < 40:
        return int(value)
    text = value.rstrip("xk ") if isinstance(value, str) else value
    try:
        factor = float(text)
    except (TypeError, ValueError):
        factor = math.nan
    if isinstance(value, bool) or not math.isfinite(factor) or not 1 <= factor <= 2**20:
        raise ConfigError(f"slots={value!r} must be a whole number of blocks or a multiple of topk >= 1, such as 1.25x")
    return math.ceil(factor * topk - 1e-9)
