"""Runs captured decode steps: picks or captures the graph, stages inputs, replays, and brings results to the host.

A graph holds a whole step. It is captured for a number of lanes, a bound on the context (rounded up) and a kind of
sampling; lengths, block counts and who runs are read on the device, so one graph serves until a bound or a memory
address changes. Results are copied out of the graph's memory behind its back, on a stream of their own, so that the
next step can already run.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nosa_sys.engine.cuda.auto import ScheduleChooser
from nosa_sys.engine.cuda.inputs import StepInputs
from nosa_sys.engine.cuda.marks import phases, spans
from nosa_sys.engine.cuda.program import StepOutputs, StepProgram, part_borders
from nosa_sys.engine.cuda.results import StepResults
from nosa_sys.engine.cuda.schedules import StepSchedule
from nosa_sys.engine.cuda.spec import StepOptions, StepSpec
from nosa_sys.engine.cuda.streams import Streams
from nosa_sys.engine.injection import Injection, geometric_origins
from nosa_sys.engine.memory import Memory
from nosa_sys.engine.plan import StepBatch, StepPlan
from nosa_sys.engine.policies import Policy
from nosa_sys.engine.record_level import RECORD_NOTHING, RECORD_SELECTIONS
from nosa_sys.engine.runner import NOT_FINITE, StepResult
from nosa_sys.engine.sampling import Draws
from nosa_sys.kernels.block_selection import describe_error
from nosa_sys.models.llama import LlamaModel
from nosa_sys.traces.timeline import Mark

# Contexts are bounded by a multiple of so many blocks: a graph serves that many births before the next capture.
_BLOCK_STEP = 32
_MAX_GRAPHS = 16
Replay = Callable[[], StepOutputs]


@dataclass(frozen=True)
class _Captured:
    """A graph with the program whose memory every replay uses: it must live as long."""

    program: StepProgram
    outputs: StepOutputs
    graph: torch.cuda.CUDAGraph

    def __call__(self) -> StepOutputs:
        self.graph.replay()
        return self.outputs


@dataclass
class _Result:
    """A step on its way to the host: ``arrays`` in pinned memory, whole when ``done`` has happened."""

    schedule: str
    batch: StepBatch
    outputs: StepOutputs
    arrays: dict[str, Tensor]
    begun: torch.cuda.Event | None
    ended: torch.cuda.Event | None
    done: torch.cuda.Event | None
    time_us: float = 0.0


class GraphRunner:
    """Runs the fused step on ``max_lanes`` lanes; ``capture`` False launches it anew at every step. Of several
    ``schedules`` the one that proves fastest is used.

    ``inspect``: results carry logits; no step then runs ahead.
    """

    def __init__(
        self,
        model: LlamaModel,
        memory: Memory,
        policy: Policy,
        schedules: Sequence[StepSchedule],
        options: StepOptions,
        *,
        max_lanes: int,
        capture: bool,
        injection: Injection | None = None,
        inspect: bool = False,
    ) -> None:
        self._model, self._memory, self._policy = model, memory, policy
        self._schedules = {schedule.name: schedule for schedule in schedules}
        self._chooser = ScheduleChooser(tuple(self._schedules))
        self._options, self._injection = options, injection
        self._capture, self._inspect = capture, inspect
        self.looks_ahead = capture and not inspect
        self._measures_only = options.skip_fetch or options.fetch_only
        self._max_lanes = max_lanes
        self._inputs = StepInputs(max_lanes, model.device)
        self._streams = Streams(model.device)
        self._results = StepResults(model.device)
        self._graphs: dict[tuple[str, int, int, bool], Replay] = {}
        self._generation = memory.generation
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._in_flight: deque[_Result] = deque()
        self.n_captures = 0
        self.last_spans: list[Mark] = []

    @property
    def schedule_in_use(self) -> str:
        """The schedule that steps run under, of those that were to be tried the one that proved fastest."""
        return self._chooser.chosen

    # ---- running
    def launch(self, batch: StepBatch, tokens: list[int], draws: Draws | None) -> None:
        """Stage and start a step; nothing waits for the device unless a graph has to be captured."""
        if self._injection is not None:
            self._injection.check_step(batch.step, batch.lanes, batch.positions)
        schedule = self._chooser.next(batch.size)
        replay = self._replay_of(schedule, batch, draws is not None)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._model.device.type == "cuda" else None
        start = time.perf_counter()
        if events:
            events[0].record()
        self._inputs.stage(batch.step, batch.lanes, batch.positions, tokens, draws)
        outputs = replay()
        if events:
            events[1].record()
        arrays, done = self._results.send(self._wanted(outputs))
        begun, ended = events or (None, None)
        time_us = (time.perf_counter() - start) * 1e6
        self._in_flight.append(_Result(schedule, batch, outputs, arrays, begun, ended, done, time_us))

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight and read its results."""
        result = self._in_flight[0]
        if result.done is not None:
            result.done.synchronize()
        if result.begun is not None and result.ended is not None:
            result.time_us = result.begun.elapsed_time(result.ended) * 1e3
        self._chooser.tell(result.schedule, result.batch.size, result.time_us)
        lanes = np.array(result.batch.lanes)
        arrays = {name: array.numpy() for name, array in result.arrays.items()}
        plan = self._plan(result, arrays, lanes)
        failures = {} if self._measures_only else _failures(arrays, lanes, result.outputs.logits.shape[0])
        tokens = arrays["packed"][lanes].tolist()
        logits = result.outputs.logits[lanes].clone() if self._inspect else None
        self._in_flight.popleft()  # last: an interrupted wait must not lose a step
        return StepResult(tokens, plan, logits, failures)

    def stop_recording(self) -> None:
        """Steps leave their tokens alone from now on (with ``inspect`` selections too), and the buffers of what was
        recorded are given back. No step may be in flight."""
        level = RECORD_SELECTIONS if self._inspect else RECORD_NOTHING
        self._options = dataclasses.replace(self._options, record=level)
        self._drop_graphs()
        self._results.release()

    # ---- graphs
    def _replay_of(self, schedule: str, batch: StepBatch, sampled: bool) -> Replay:
        if self._generation != self._memory.generation:
            self._drop_graphs()
        key = (schedule, self._n_lanes(batch), self._n_blocks(batch), sampled)
        if key not in self._graphs:
            if len(self._graphs) >= _MAX_GRAPHS:
                self._graphs.pop(next(iter(self._graphs)))
            program = self._program(*key)
            self._graphs[key] = self._capture_step(program) if self._capture else program.run
        self._graphs[key] = self._graphs.pop(key)  # the one used longest ago is the first to go
        return self._graphs[key]

    def _drop_graphs(self) -> None:
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle() if self._capture else None  # a pool ends with its last graph
        self._generation = self._memory.generation

    def _n_lanes(self, batch: StepBatch) -> int:
        """Lanes of the graph: as many as run, rounded up beyond 16 so that joins and leaves find a graph."""
        n = max(batch.lanes) + 1
        return min(n if n <= 16 else -(-n // 8) * 8, self._max_lanes)

    def _n_blocks(self, batch: StepBatch) -> int:
        return min(-(-batch.max_blocks // _BLOCK_STEP) * _BLOCK_STEP, self._memory.context.n_blocks)

    def _program(self, schedule: str, n_lanes: int, n_blocks: int, sampled: bool) -> StepProgram:
        cfg, chosen = self._memory.cfg, self._schedules[schedule]
        spec = StepSpec(
            model=self._model,
            memory=self._memory,
            policy=self._policy,
            options=self._options,
            injection=self._injection,
            n_lanes=n_lanes,
            n_blocks=n_blocks,
            n_windows=min(n_blocks * cfg.windows_per_block, self._memory.context.n_windows),
            sampled=sampled,
            splits_attention=chosen.splits_attention,
        )
        return StepProgram(spec, chosen, self._inputs, self._streams)

    @torch.inference_mode()
    def _capture_step(self, program: StepProgram) -> Replay:
        """Warm up with no lane running (compiles kernels, changes nothing), then capture."""
        self._inputs.clear()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            program.run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = program.run()
        self.n_captures += 1

        return _Captured(program, outputs, graph)

    # ---- results
    def _wanted(self, outputs: StepOutputs) -> dict[str, Tensor]:
        names = ["packed", "errors"]
        if self._options.record > RECORD_NOTHING:
            names += ["block_ids", "origins", "window_scores", "new_beta_means"]
        if self._options.timed:
            names.append("clock")
        return {name: value for name in names if (value := getattr(outputs, name)) is not None}

    def _plan(self, result: _Result, arrays: dict[str, NDArray[Any]], lanes: NDArray[np.int64]) -> StepPlan:
        batch, n_lanes = result.batch, result.outputs.logits.shape[0]
        n_layers, n_heads = self._model.n_layers, self._memory.n_kv_heads
        packed = arrays["packed"][2 * n_lanes :]
        misses = np.zeros((n_layers, n_lanes, n_heads), dtype=np.int32)
        if self._memory.slots is not None:
            misses = packed[: misses.size].reshape(misses.shape)
            packed = packed[misses.size :]
        speculated = packed.reshape(2, n_layers).astype(np.int64) if packed.size else (None, None)
        by_lane: dict[str, NDArray[Any]] = {
            name: arrays[name][:, lanes]
            for name in ("block_ids", "origins", "window_scores", "new_beta_means")
            if name in arrays
        }
        if "new_beta_means" in by_lane:
            by_lane["new_beta_means"] = by_lane["new_beta_means"][:, batch.windows_done]
            by_lane["window_scores"] = by_lane["window_scores"][..., : batch.max_windows]
        if self._injection is not None and "block_ids" in by_lane:
            by_lane["origins"] = geometric_origins(by_lane["block_ids"], batch.blocks, self._memory.cfg)
        if self._options.record > RECORD_NOTHING and self._memory.method.dense:
            by_lane |= _everything(batch, n_layers, n_heads)
        phase_us = None
        if "clock" in arrays:
            phase_us = phases(arrays["clock"])
            block_bytes = self._memory.block_bytes
            parts = np.split(misses.sum(axis=2), part_borders(n_lanes, len(arrays["clock"]))[1:-1], axis=1)
            self.last_spans = spans(arrays["clock"], np.stack([p.sum(axis=1) for p in parts]) * block_bytes)
        return StepPlan(
            batch=batch,
            n_misses=misses[:, lanes],
            time_us=result.time_us,
            counts=np.minimum(batch.blocks, batch.dense_blocks).astype(np.int32),
            phase_us=phase_us,
            prefetch_loads=speculated[0],
            wasted_loads=speculated[1],
            **by_lane,
        )


def _failures(arrays: dict[str, NDArray[Any]], lanes: NDArray[np.int64], n_lanes: int) -> dict[int, str]:
    """Rows whose logits are not finite or whose scores had a NaN, with the reason."""
    failures = {row: NOT_FINITE for row, lane in enumerate(lanes) if arrays["packed"][n_lanes + lane]}
    errors = arrays.get("errors")
    if errors is not None and (errors[:, lanes] >= 0).any():
        for row, lane in enumerate(lanes):
            found = np.argwhere(errors[:, lane] >= 0)
            if len(found):
                layer, head = found[0]
                failures[row] = describe_error(int(errors[layer, lane, head]), f"layer {layer}, KV head {head}")
    return failures


def _everything(batch: StepBatch, n_layers: int, n_heads: int) -> dict[str, NDArray[Any]]:
    """The selection of dense attention: every block of every row, origin dense."""
    ids = np.arange(batch.max_blocks, dtype=np.int32)
    exists = ids < np.array(batch.blocks)[:, None]
    shape = (n_layers, batch.size, n_heads, batch.max_blocks)
    block_ids = np.broadcast_to(np.where(exists, ids, -1)[None, :, None], shape)
    origins = np.broadcast_to(np.where(exists, 4, -1).astype(np.int8)[None, :, None], shape)
    return {"block_ids": block_ids, "origins": origins}
