"""The progress bar of a run that decodes: loading, prefill, then tokens with ETA and the rate of the last seconds."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType

from rich.console import Console
from rich.progress import TaskID

from nosa_sys.cli.console import progress as progress_bar

_RATE_SPAN_S = 2.0
_STAGES = {"load": "loading the model", "profile": "profiling", "cells": "measuring cells"}


class LiveRate:
    """Tokens per second over the last two seconds; ``now_s`` comes from the caller's clock."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def at(self, now_s: float, done: int) -> float | None:
        """The rate after ``done`` tokens; None until two points are apart in time."""
        self._points.append((now_s, done))
        while len(self._points) > 2 and self._points[1][0] <= now_s - _RATE_SPAN_S:
            self._points.popleft()
        first_s, first = self._points[0]
        return (done - first) / (now_s - first_s) if now_s > first_s else None


class DecodeProgress:
    """Callable as (stage, done, total); total 0 shows a pulse."""

    def __init__(self, console: Console) -> None:
        self._bar = progress_bar(console)
        self._rate = LiveRate()
        self._stage: str | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> DecodeProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bar.stop()

    def warn(self, text: str) -> None:
        """A line above the bar."""
        self._bar.console.print(f"note: {text}", soft_wrap=True)

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage or self._task is None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._stage = stage
            self._rate = LiveRate()
            self._task = self._bar.add_task(_STAGES.get(stage, stage), total=total or None, note="")
        note = ""
        if stage in ("decode", "prefill") and done:
            rate = self._rate.at(time.monotonic(), done)
            note = f"{rate:.1f} tok/s" if rate is not None else ""
        self._bar.update(self._task, completed=done, total=total or None, note=note)
