"""Schedule ``auto``: try every schedule on the running batch for a few steps, stay with the fastest, look again later.

All schedules give the same tokens and share the engine's memory, so a step may run under any of them. Which is fastest
depends on batch, context and how many blocks are missed: it is measured, not guessed.
"""

from __future__ import annotations

from collections.abc import Sequence

# Steps a candidate gets in a trial, the first of which (it may follow a capture) does not count.
_TRIAL_STEPS = 6
_STEPS_BETWEEN_TRIALS = 512


class ScheduleChooser:
    """Says which schedule each step runs under; ``names`` in the order of preference where times are equal."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._times: dict[str, list[float]] = {}
        self._queue: list[str] = []
        self._left = 0
        self._size = 0
        self._open = False  # a trial whose times are not all told yet
        self.chosen = self._names[0]

    def next(self, n_rows: int) -> str:
        """The schedule of the next step of a batch of ``n_rows``: another batch size starts another trial. Steps may
        be asked for before the ones before them are told of."""
        if len(self._names) == 1:
            return self.chosen
        if n_rows != self._size or self._left <= 0:
            self._size, self._times, self._open = n_rows, {}, True
            self._queue = [name for name in self._names for _ in range(_TRIAL_STEPS)]
            self._left = _STEPS_BETWEEN_TRIALS
        if self._queue:
            return self._queue.pop(0)
        self._left -= 1
        return self.chosen

    def tell(self, name: str, n_rows: int, time_us: float) -> None:
        """A step of ``n_rows`` took so long."""
        if n_rows != self._size or not self._open:
            return
        self._times.setdefault(name, []).append(time_us)
        if all(len(self._times.get(n, ())) >= _TRIAL_STEPS for n in self._names):
            self.chosen = min(self._names, key=lambda n: _median(self._times[n][1:]))
            self._open = False


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
