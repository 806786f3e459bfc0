"""Recorder: writes a trace from the plans of a run. It only observes; a run with it gives the same tokens."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nosa_sys.engine.phases import PHASES
from nosa_sys.engine.plan import StepPlan
from nosa_sys.engine.prefill import PrefillCost
from nosa_sys.errors import ConfigError
from nosa_sys.traces.schema import WHOLE_STEP_LAYER, SequenceInfo, TraceMeta
from nosa_sys.traces.writer import TraceWriter

FLUSH_INTERVAL_S = 2.0


class Recorder:
    """Give it to one Engine; as a context manager it completes the trace, or leaves it incomplete after an error.

    ``facts`` are fields of TraceMeta that an engine does not know: device, driver, pcie, versions, git_revision, seed.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        overwrite: bool = False,
        rows_per_part: int = 65536,
        facts: dict[str, Any] | None = None,
    ) -> None:
        self.directory = Path(directory)
        self._overwrite, self._rows_per_part, self._facts = overwrite, rows_per_part, dict(facts or {})
        self._writer: TraceWriter | None = None
        self._sequences: dict[int, SequenceInfo] = {}
        self._previous: dict[int, np.ndarray] = {}
        self._n_steps = self._longest_blocks = 0
        self._dense = False
        self._block_bytes = 0
        self._flushed_at_s = time.monotonic()

    @property
    def _open_writer(self) -> TraceWriter:
        if self._writer is None:
            raise ConfigError(f"the recorder of {self.directory} has no engine yet: pass it to Engine(recorder=...)")
        return self._writer

    # ---- called by the engine
    def start(self, meta: TraceMeta, dense: bool) -> None:
        """Open the trace; ``meta`` is what the engine knows."""
        if self._writer is not None:
            raise ConfigError(f"the recorder of {self.directory} serves an engine already; make one for each")
        meta = dataclasses.replace(meta, **self._facts)
        self._dense, self._block_bytes = dense, meta.block_bytes
        self._writer = TraceWriter(self.directory, meta, rows_per_part=self._rows_per_part, overwrite=self._overwrite)

    def on_start_sequence(self, info: SequenceInfo, cost: PrefillCost | None, beta_means: list[Tensor] | None) -> None:
        """A sequence was prefilled (``cost`` None: it was resumed, or has nothing to prefill).

        ``beta_means`` [kv_head, window] a layer, when scores are recorded.
        """
        self._sequences[info.id] = info
        writer = self._open_writer
        if cost is not None:
            n_layers = len(cost.h2d_bytes)
            writer.add(
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
        if beta_means is not None:
            means = np.stack([layer.cpu().numpy() for layer in beta_means])
            layer, head, window = (axis.ravel() for axis in np.indices(means.shape))
            self._add_betas(np.full(means.size, info.id), layer, head, window, means.ravel())

    def on_step(self, plan: StepPlan) -> None:
        """Write the rows of one decode step, sequence by sequence, then layer by layer, then head by head."""
        self._add_selections(plan)
        if plan.layers[0].window_scores is not None:
            self._add_scores(plan)
        self._add_step(plan)  # last: its row says that the step is whole
        self._n_steps = plan.layout.step + 1
        self._flush_when_due()
        for sequence, blocks in zip(plan.layout.sequences, plan.layout.blocks, strict=True):
            info = self._sequences[sequence]
            self._sequences[sequence] = dataclasses.replace(info, new_tokens=info.new_tokens + 1)
            self._longest_blocks = max(self._longest_blocks, blocks)

    def on_leave(self, sequence: int) -> None:
        """A sequence is gone: its last selection is no longer needed."""
        self._previous.pop(sequence, None)

    def _flush_when_due(self) -> None:
        """Put the rows on disk at every doubling of the steps and every few seconds, so that a run that is killed
        loses less than half of its steps and no more than those seconds."""
        doubled = self._n_steps & (self._n_steps - 1) == 0
        if doubled or time.monotonic() - self._flushed_at_s >= FLUSH_INTERVAL_S:
            self._open_writer.flush()
            self._flushed_at_s = time.monotonic()

    # ---- rows
    def _add_selections(self, plan: StepPlan) -> None:
        layout = plan.layout
        all_ids = np.stack([layer.selection.block_ids.cpu().numpy() for layer in plan.layers], axis=1)
        all_origins = np.stack([layer.selection.origins.cpu().numpy() for layer in plan.layers], axis=1)
        misses = plan.misses().numpy().transpose(1, 0, 2)  # [batch, layer, head], as the two above but for k
        counts = plan.layers[0].selection.counts.tolist()
        n_layers, n_heads = misses.shape[1:]
        block_ids: list[np.ndarray] = []
        origins: list[np.ndarray] = []
        gamma = np.full(misses.shape, np.nan)
        for row, sequence in enumerate(layout.sequences):
            ids = all_ids[row, :, :, : counts[row]].reshape(n_layers * n_heads, -1)
            block_ids.extend(ids)
            origins.extend(all_origins[row, :, :, : counts[row]].reshape(n_layers * n_heads, -1))
            if not layout.cold[row]:
                shared = count_shared(ids, self._previous[sequence])
                gamma[row] = (shared / ids.shape[1]).reshape(n_layers, n_heads)
            self._previous[sequence] = ids
        per_row = n_layers * n_heads
        self._open_writer.add(
            "selections",
            {
                "step": np.full(misses.size, layout.step),
                "position": np.repeat(layout.positions, per_row),
                "sequence": np.repeat(layout.sequences, per_row),
                "layer": np.tile(np.repeat(np.arange(n_layers), n_heads), layout.batch),
                "kv_head": np.tile(np.arange(n_heads), layout.batch * n_layers),
                "block_ids": block_ids,
                "origins": origins,
                "n_misses": misses.ravel(),
                "h2d_bytes": misses.ravel() * self._block_bytes,
                "gamma": gamma.ravel(),
                "cold": np.repeat(layout.cold, per_row),
            },
        )

    def _add_step(self, plan: StepPlan) -> None:
        layout = plan.layout
        misses = plan.misses().sum(dim=(1, 2)).numpy()
        n_layers = len(misses)
        n_heads = plan.layers[0].n_misses.shape[1]
        written = np.full(n_layers, layout.n_written_back * n_heads * self._block_bytes)
        zeros = np.zeros(n_layers + 1, dtype=np.int64)
        columns: dict[str, Any] = {
            "step": zeros + layout.step,
            "layer": np.append(np.arange(n_layers), WHOLE_STEP_LAYER),
            "n_sequences": zeros + layout.batch,
            "n_misses": _with_sum(misses),
            "h2d_bytes": _with_sum(misses * self._block_bytes),
            "d2h_bytes": _with_sum(written),
            "prefetch_bytes": zeros,
            "wasted_prefetch_bytes": zeros,
        }
        phases = [layer.phase_us for layer in plan.layers if layer.phase_us is not None]
        if phases:
            for name in PHASES:
                columns[name] = _with_sum(np.array([p[name] for p in phases]))
            columns["time_us"] = np.append([sum(p.values()) for p in phases], plan.time_us)
        else:
            columns["time_us"] = np.append(np.full(n_layers, np.nan), plan.time_us)
        self._open_writer.add("steps", columns)

    def _add_scores(self, plan: StepPlan) -> None:
        layout = plan.layout
        parts = [p.window_scores for p in plan.layers if p.window_scores is not None]
        scores = torch.stack(parts).to("cpu", torch.float32).numpy()  # [layer, batch, head, window]
        layer, row, head = (axis.ravel() for axis in np.indices(scores.shape[:3]))
        sequences, n_windows = np.array(layout.sequences), layout.n_windows_t.cpu().numpy()
        flat, widths = scores.reshape(len(layer), -1), n_windows[row]
        self._open_writer.add(
            "scores",
            {
                "step": np.full(len(layer), layout.step),
                "sequence": sequences[row],
                "layer": layer,
                "kv_head": head,
                "window_scores": [flat[i, :width] for i, width in enumerate(widths.tolist())],
            },
        )
        done = np.array(layout.windows_done, dtype=np.int64)
        new = [p.new_beta_means for p in plan.layers if p.new_beta_means is not None]
        if new:
            means = torch.stack(new).cpu().numpy()  # [layer, row of windows_done, head]
            layer, row, head = (axis.ravel() for axis in np.indices(means.shape))
            self._add_betas(sequences[done][row], layer, head, n_windows[done][row] - 1, means.ravel())

    def _add_betas(
        self, sequence: np.ndarray, layer: np.ndarray, head: np.ndarray, window: np.ndarray, mean: np.ndarray
    ) -> None:
        columns = {"sequence": sequence, "layer": layer, "kv_head": head, "window": window, "beta_mean": mean}
        self._open_writer.add("betas", columns)

    # ---- ending
    def close(self) -> None:
        """Complete the trace."""
        changes: dict[str, Any] = {"sequences": tuple(self._sequences.values()), "n_steps": self._n_steps}
        if self._dense:
            changes["slots"] = self._longest_blocks
        self._open_writer.close(**changes)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer is None:
            return
        if kind is None:
            self.close()
        else:
            self._writer.__exit__(kind, error, traceback)


def count_shared(ids: np.ndarray, previous: np.ndarray) -> np.ndarray:
    """|G & Gprev| of each row: int [rows, k] and [rows, k'], ascending ids without padding -> int64 [rows]."""
    span = int(max(ids.max(initial=0), previous.max(initial=0))) + 1
    first = np.arange(len(ids), dtype=np.int64)[:, None] * span
    keys, old = (ids + first).ravel(), (previous + first).ravel()
    place = np.searchsorted(old, keys).clip(max=max(0, old.size - 1))
    return (old[place] == keys).reshape(ids.shape).sum(axis=1)


def _with_sum(values: np.ndarray) -> np.ndarray:
    return np.append(values, values.sum())
