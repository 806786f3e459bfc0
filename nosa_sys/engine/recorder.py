"""Recorder: writes a trace from the plans of a run. It only observes; a run with it gives the same tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nosa_sys.engine.plan import StepPlan
from nosa_sys.engine.prefill import PrefillCost
from nosa_sys.engine.recorder_rows import (
    SelectionHistory,
    first_beta_columns,
    new_beta_columns,
    score_columns,
    step_columns,
)
from nosa_sys.engine.work_thread import WorkThread
from nosa_sys.errors import ConfigError, TraceError
from nosa_sys.traces.schema import TIMELINE_FILE, SequenceInfo, TraceMeta
from nosa_sys.traces.timeline import Mark, StepMarks, write_timeline
from nosa_sys.traces.writer import TraceWriter

FLUSH_INTERVAL_S = 2.0
MAX_PENDING_CALLS = 8  # a step of 32 layers, 64 rows, 2 heads and 64 blocks holds 1.3 MB


class Recorder:
    """Give it to one Engine; as a context manager it completes the trace, or leaves it incomplete after an error.

    ``facts`` are fields of TraceMeta that an engine does not know: device, driver, pcie, versions, git_revision, seed.

    With ``background`` one thread does the work, in order, and every call returns at once unless more than
    MAX_PENDING_CALLS wait. An error of that thread is raised by the next call and by `close`. Arrays of a plan belong
    to the recorder until `consumed_steps` has passed the plan.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        overwrite: bool = False,
        rows_per_part: int = 65536,
        facts: dict[str, Any] | None = None,
        background: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self._overwrite, self._rows_per_part, self._facts = overwrite, rows_per_part, dict(facts or {})
        self._background = background
        self._thread: WorkThread | None = None
        self._writer: TraceWriter | None = None
        self._sequences: dict[int, SequenceInfo] = {}
        self._new_tokens: dict[int, int] = {}
        self._history = SelectionHistory()
        self._marks: list[StepMarks] = []
        self._marks_end_us = 0.0
        self._n_steps = self._longest_blocks = self._consumed_steps = 0
        self._step_over = threading.Condition()
        self._dense = False
        self._block_bytes = 0
        self._flushed_at_s = time.monotonic()

    @property
    def _open_writer(self) -> TraceWriter:
        if self._writer is None:
            raise ConfigError(f"the recorder of {self.directory} has no engine yet: pass it to Engine(recorder=...)")
        return self._writer

    @property
    def consumed_steps(self) -> int:
        """Calls of `on_step` whose plan is not read any more (or never will be, after an error)."""
        return self._consumed_steps

    def wait_consumed(self, n_steps: int) -> None:
        """Block until `consumed_steps` is at least ``n_steps``; raises the error of the thread, if there is one."""
        with self._step_over:
            self._step_over.wait_for(lambda: self._consumed_steps >= n_steps)
        if self._thread is not None:
            self._thread.raise_error()

    # ---- called by the engine
    def start(self, meta: TraceMeta, dense: bool) -> None:
        """Open the trace; ``meta`` is what the engine knows."""
        if self._writer is not None:
            raise ConfigError(f"the recorder of {self.directory} serves an engine already; make one for each")
        meta = dataclasses.replace(meta, **self._facts)
        self._dense, self._block_bytes = dense, meta.block_bytes
        self._writer = TraceWriter(self.directory, meta, rows_per_part=self._rows_per_part, overwrite=self._overwrite)
        if self._background:
            importlib.import_module("pandas")  # pyarrow asks for it on first use: not in the middle of a run
            self._thread = WorkThread("recorder", MAX_PENDING_CALLS)

    def on_start_sequence(self, info: SequenceInfo, cost: PrefillCost | None, beta_means: list[Tensor] | None) -> None:
        """A sequence was prefilled (``cost`` None: it was resumed, or has nothing to prefill).

        ``beta_means`` [kv_head, window] a layer, when scores are recorded; copied before this returns.
        """
        means = None if beta_means is None else np.stack([layer.cpu().numpy() for layer in beta_means])
        self._do(lambda: self._write_start(info, cost, means))

    def on_step(self, plan: StepPlan, marks: Sequence[Mark] = (), begin_us: float | None = None) -> None:
        """Write the rows of one decode step, sequence by sequence, then layer by layer, then head by head.

        ``marks``: what ran where, in microseconds from ``begin_us``, when the step began on the clock of the run
        (default: at the end of the marked step before). With any marks `close` leaves a timeline beside the tables.
        Raises ConfigError for a plan without its selection.
        """
        self._do(lambda: self._write_step(plan, marks, begin_us), self._count_consumed)

    def on_leave(self, sequence: int) -> None:
        """A sequence is gone: its last selection is no longer needed."""
        self._do(lambda: self._history.forget(sequence))

    # ---- the work, in this thread or the other
    def _do(self, work: Callable[[], None], after: Callable[[], None] = lambda: None) -> None:
        if self._thread is not None:
            self._thread.submit(work, after)
            return
        try:
            work()
        finally:
            after()

    def _count_consumed(self) -> None:
        with self._step_over:
            self._consumed_steps += 1
            self._step_over.notify_all()

    def _write_start(self, info: SequenceInfo, cost: PrefillCost | None, means: NDArray[Any] | None) -> None:
        self._sequences[info.id] = info
        self._new_tokens[info.id] = 0
        if cost is not None:
            n_layers = len(cost.h2d_bytes)
            self._open_writer.add(
                "prefill",
                {
                    "sequence": np.full(n_layers, info.id),
                    "layer": np.arange(n_layers),
                    "n_tokens": np.full(n_layers, cost.n_tokens),
                    "h2d_bytes": cost.h2d_bytes,
                    "d2h_bytes": cost.d2h_bytes,
                    "time_us": cost.time_us,
                },
            )
        if means is not None:
            self._open_writer.add("betas", first_beta_columns(info.id, means))

    def _write_step(self, plan: StepPlan, marks: Sequence[Mark], begin_us: float | None) -> None:
        writer = self._open_writer
        writer.add("selections", self._history.columns(plan, self._block_bytes))
        if plan.window_scores is not None:
            writer.add("scores", score_columns(plan, plan.window_scores))
        if plan.new_beta_means is not None:
            writer.add("betas", new_beta_columns(plan, plan.new_beta_means))
        writer.add("steps", step_columns(plan, self._block_bytes))  # last: it says that the step is whole
        self._n_steps = plan.batch.step + 1
        self._flush_when_due()
        for sequence in plan.batch.sequences:
            self._new_tokens[sequence] += 1
        self._longest_blocks = max(self._longest_blocks, plan.batch.max_blocks)
        if marks:
            self._keep_marks(plan, marks, self._marks_end_us if begin_us is None else begin_us)

    def _keep_marks(self, plan: StepPlan, marks: Sequence[Mark], begin_us: float) -> None:
        assert plan.counts is not None
        n_selected = int(plan.counts.sum()) * plan.n_misses.shape[0] * plan.n_misses.shape[2]
        self._marks.append(StepMarks(plan.batch.step, begin_us, marks, 1 - int(plan.n_misses.sum()) / n_selected))
        self._marks_end_us = begin_us + plan.time_us

    def _flush_when_due(self) -> None:
        """Put the rows on disk at every doubling of the steps and every few seconds, so that a run that is killed
        loses less than half of its steps and no more than those seconds."""
        doubled = self._n_steps & (self._n_steps - 1) == 0
        if doubled or time.monotonic() - self._flushed_at_s >= FLUSH_INTERVAL_S:
            self._open_writer.flush()
            self._flushed_at_s = time.monotonic()

    # ---- ending
    def close(self) -> None:
        """Wait for the thread, if there is one, and complete the trace. An error of the thread is raised here; the
        trace then stays incomplete, with the rows so far."""
        writer = self._open_writer
        if self._thread is not None:
            self._thread.stop()
            if self._thread.error is not None:
                self._abandon()
                raise self._thread.error
            self._thread = None
        if self._marks:
            write_timeline(self.directory / TIMELINE_FILE, self._marks)
        sequences = (
            dataclasses.replace(info, new_tokens=self._new_tokens[info.id]) for info in self._sequences.values()
        )
        changes: dict[str, Any] = {"sequences": tuple(sequences), "n_steps": self._n_steps}
        if self._dense:
            changes["slots"] = self._longest_blocks
        writer.close(**changes)

    def _abandon(self) -> None:
        """Keep the rows so far; an error is on its way already, and a second one would only hide it."""
        with contextlib.suppress(TraceError):
            self._open_writer.abandon()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer is None:
            return
        if kind is None:
            self.close()
            return
        if self._thread is not None:
            self._thread.stop()
            if error is not None and self._thread.error not in (None, error):
                error.add_note(f"the recorder of {self.directory} had failed too: {self._thread.error!r}")
            self._thread = None
        self._abandon()
