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
    """Says which schedule each step runs under; ``names`` in the order of preference where times are equal.

    Batches of about one size (``size_class``) share a trial, which goes on where it stood when such a batch is back:
    joins and leaves never begin it anew. Until its own is over a class runs under what was chosen last.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._trials: dict[int, _Trial] = {}
        self.chosen = self._names[0]

    def next(self, n_rows: int) -> str:
        """The schedule of the next step of a batch of ``n_rows``. Steps may be asked for before the ones before them
        are told of."""
        if len(self._names) == 1:
            return self.chosen
        trial = self._trials.setdefault(size_class(n_rows), _Trial(self._names))
        name = trial.next()
        if name is None:
            self.chosen = name = trial.chosen or self.chosen
        return name

    def tell(self, name: str, n_rows: int, time_us: float) -> None:
        """A step of ``n_rows`` took so long."""
        trial = self._trials.get(size_class(n_rows))
        if trial is not None and trial.tell(name, time_us):
            self.chosen = trial.chosen or self.chosen


class _Trial:
    """The trials of one size class, one every so many steps. ``chosen``: what the last one that is over found."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.chosen: str | None = None
        self._begin()

    def _begin(self) -> None:
        self._times: dict[str, list[float]] = {name: [] for name in self._names}
        self._queue = [name for name in self._names for _ in range(_TRIAL_STEPS)]
        self._left = _STEPS_BETWEEN_TRIALS
        self._open = True  # not all times are told yet

    def next(self) -> str | None:
        """The schedule to try; None: no trial is due."""
        if self._left <= 0:
            self._begin()
        if self._queue:
            return self._queue.pop(0)
        self._left -= 1
        return None

    def tell(self, name: str, time_us: float) -> bool:
        """Count a step; whether the trial is over with it."""
        if not self._open:
            return False
        self._times[name].append(time_us)
        if any(len(times) < _TRIAL_STEPS for times in self._times.values()):
            return False
        self.chosen = min(self._names, key=lambda n: _median(self._times[n][1:]))
        self._open = False
        return True


def size_class(n_rows: int) -> int:
    """Batches that share a trial: each size up to 8 for itself, beyond that sizes within an eighth to a quarter.

    >>> [size_class(n) for n in (4, 5, 8, 9, 10, 11, 33, 40, 41)]
    [4, 5, 8, 10, 10, 12, 40, 40, 48]
    """
    step = 1 << max(0, (n_rows - 1).bit_length() - 3)
    return -(-n_rows // step) * step


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
