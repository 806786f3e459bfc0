"""Recorder: writes a trace from the plans of a run. It only observes; a run with it gives the same tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    selection_of,
    step_columns,
)
from nosa_sys.errors import ConfigError, TraceError
from nosa_sys.traces.schema import TIMELINE_FILE, SequenceInfo, TraceMeta
from nosa_sys.traces.timeline import Mark, StepMarks, write_timeline
from nosa_sys.traces.writer import TraceWriter
from nosa_sys.work_thread import WorkThread

FLUSH_INTERVAL_S = 2.0
# A step of 32 layers, 64 rows, 2 heads and 64 blocks holds 1.3 MB, with scores at 16K 17 MB more.
MAX_PENDING_BYTES = 128 * 2**20  # with the other thread
_CHUNK_BYTES = 64 * 2**20  # handed over at once, unless a single step holds more


@dataclass
class _Chunk:
    """Steps that are converted together, and the sequences that have left since the chunk before."""

    steps: list[tuple[StepPlan, Sequence[Mark], float | None]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    n_rows: int = 0
    n_bytes: int = 0


class Recorder:
    """Give it to one Engine; as a context manager it completes the trace, or leaves it incomplete after an error.

    ``facts`` are fields of TraceMeta that an engine does not know: device, driver, pcie, versions, git_revision, seed.

    Steps are kept as they come and made into rows many at once, when a part is due. With ``background`` one thread does
    that, in order, another one writes, and every call returns at once unless more than MAX_PENDING_BYTES wait. An error
    of these threads is raised by a later call and by `close`. Arrays of a plan belong to the recorder until
    `consumed_steps` has passed the plan; `wait_consumed` hurries it.
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
        self._chunk = _Chunk()
        self._n_steps = self._longest_blocks = self._consumed_steps = 0
        self._step_over = threading.Condition()
        self._closed = False
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
        self._raise_error()
        self._hand_over()
        with self._step_over:
            self._step_over.wait_for(lambda: self._consumed_steps >= n_steps)
        self._raise_error()

    # ---- called by the engine
    def start(self, meta: TraceMeta, dense: bool) -> None:
        """Open the trace; ``meta`` is what the engine knows."""
        if self._writer is not None:
            raise ConfigError(f"the recorder of {self.directory} serves an engine already; make one for each")
        meta = dataclasses.replace(meta, **self._facts)
        self._dense, self._block_bytes = dense, meta.block_bytes
        self._writer = TraceWriter(
            self.directory,
            meta,
            rows_per_part=self._rows_per_part,
            overwrite=self._overwrite,
            background=self._background,
        )
        self._flushed_at_s = time.monotonic()
        if self._background:
            importlib.import_module("pandas")  # pyarrow asks for it on first use: not in the middle of a run
            self._thread = WorkThread("recorder", MAX_PENDING_BYTES)

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
        if self._closed:
            raise TraceError(f"the recorder of {self.directory} is closed; no step can be added")
        selection_of(plan)
        self._raise_error()
        chunk = self._chunk
        chunk.steps.append((plan, marks, begin_us))
        chunk.n_rows += plan.n_misses.size
        chunk.n_bytes += sum(value.nbytes for value in vars(plan).values() if isinstance(value, np.ndarray))
        if self._is_due(plan.batch.step + 1):
            self._hand_over()

    def on_leave(self, sequence: int) -> None:
        """A sequence is gone: its last selection is no longer needed."""
        self._raise_error()
        self._chunk.left.append(sequence)

    def _is_due(self, n_steps: int) -> bool:
        """Rows go to disk at every doubling of the steps and every few seconds, so that a run that is killed loses less
        than half of its steps and no more than those seconds; and when they are many."""
        doubled = n_steps & (n_steps - 1) == 0
        many = self._chunk.n_rows >= self._rows_per_part or self._chunk.n_bytes >= _CHUNK_BYTES
        return doubled or many or time.monotonic() - self._flushed_at_s >= FLUSH_INTERVAL_S

    def _hand_over(self) -> None:
        """Have the steps so far written."""
        chunk, self._chunk = self._chunk, _Chunk()
        if not chunk.steps:
            self._chunk.left = chunk.left
            return
        self._flushed_at_s = time.monotonic()
        self._do(lambda: self._write_chunk(chunk), lambda: self._count_consumed(len(chunk.steps)), chunk.n_bytes)

    # ---- the work, in this thread or the other
    def _do(self, work: Callable[[], None], after: Callable[[], None] = lambda: None, size: int = 0) -> None:
        if self._thread is None:
            try:
                work()
            finally:
                after()
            return
        try:
            self._thread.submit(work, after, size=size)
        except BaseException:
            after()
            raise

    def _raise_error(self) -> None:
        if self._thread is not None:
            self._thread.raise_error()

    def _count_consumed(self, n_steps: int) -> None:
        with self._step_over:
            self._consumed_steps += n_steps
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

    def _write_chunk(self, chunk: _Chunk) -> None:
        writer, plans = self._open_writer, [plan for plan, _, _ in chunk.steps]
        for plan in plans:
            if plan.window_scores is not None:
                writer.add("scores", score_columns(plan, plan.window_scores))
            if plan.new_beta_means is not None:
                writer.add("betas", new_beta_columns(plan, plan.new_beta_means))
        selections = self._history.columns(plans, self._block_bytes)
        writer.add("steps", step_columns(plans, self._block_bytes))  # before the rows that may fill a part: one flush
        writer.add("selections", selections)
        writer.flush()
        self._n_steps = plans[-1].batch.step + 1
        for sequence in chunk.left:
            self._history.forget(sequence)
        for plan, marks, begin_us in chunk.steps:
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

    # ---- ending
    def close(self) -> None:
        """Wait for the threads, if there are any, and complete the trace. An error of theirs is raised here; the trace
        then stays incomplete, with the rows so far."""
        writer = self._open_writer
        error = self._finish_work()
        if error is not None:
            self._abandon()
            raise error
        if self._marks:
            write_timeline(self.directory / TIMELINE_FILE, self._marks)
        sequences = (
            dataclasses.replace(info, new_tokens=self._new_tokens[info.id]) for info in self._sequences.values()
        )
        changes: dict[str, Any] = {"sequences": tuple(sequences), "n_steps": self._n_steps}
        if self._dense:
            changes["slots"] = self._longest_blocks
        writer.close(**changes)

    def _finish_work(self) -> BaseException | None:
        """Hand over the last steps and wait until all are written or failed: the first error."""
        self._closed = True
        try:
            self._hand_over()
        except Exception as error:
            first: BaseException | None = error
        else:
            first = None
        if self._thread is not None:
            self._thread.stop()
            first = self._thread.error or first
        return first

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
        other = self._finish_work()
        if error is not None and other not in (None, error):
            error.add_note(f"the recorder of {self.directory} had failed too: {other!r}")
        self._abandon()
