"""Run the CPU engine on one cell (batch, budgets, slots, context, method): its trace, and the fastest of some runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nosa_sys.engine.engine import Engine
from nosa_sys.engine.phases import PHASES
from nosa_sys.engine.recorder import Recorder
from nosa_sys.engine.sequence import SequenceState
from nosa_sys.errors import HardwareError, NosaError
from nosa_sys.models.llama import LlamaModel
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.schema import WHOLE_STEP_LAYER

# Prompts that differ; more sequences than these are copies, whose steps cost the same.
MAX_DISTINCT_PROMPTS = 2


@dataclass(frozen=True)
class EngineCell:
    """One situation of the engine. ``context`` is the prompt's tokens, ``steps`` the warm steps of a run.

    ``slots`` and ``policy`` None: the engine's own choice (the only one for dense attention).
    """

    sparse: SparseConfig
    method: str
    batch: int
    context: int
    slots: int | None
    policy: str | None
    steps: int


@dataclass(frozen=True)
class CellTimes:
    """Means over the warm steps of the fastest run, microseconds a step.

    ``phase_us`` are the sums over layers of the phases that the trace's steps table records; ``rest_us`` is the step
    outside its layers: embedding, output head, bookkeeping. ``run_us`` are the means of all runs, in their order.
    """

    step_us: float
    phase_us: dict[str, float]
    rest_us: float
    run_us: tuple[float, ...]


@dataclass(frozen=True)
class CellRun:
    """A run: its trace, its times, and the bytes that the engine had allocated at its end."""

    trace: Trace
    times: CellTimes
    allocated: dict[str, int]


def prefilled(model: LlamaModel, cell: EngineCell, seed: int) -> list[SequenceState]:
    """Sequences of the cell's context, ready to decode; every run starts from these, so the prompt is read once."""
    rng = np.random.default_rng(seed)
    engine = Engine(model, cell.sparse, method=cell.method, slots=cell.slots, policy=cell.policy)
    states = []
    for _ in range(min(cell.batch, MAX_DISTINCT_PROMPTS)):
        prompt = rng.integers(0, model.shape.vocab_size, size=cell.context).tolist()
        sequence = engine.add(prompt, cell.steps + 2)
        engine.step()
        states.append(engine.save(sequence))
        engine.cancel(sequence)
    return states


def run_cell(model: LlamaModel, cell: EngineCell, states: list[SequenceState], directory: Path) -> CellRun:
    """One run from the prefilled states, recorded into ``directory``: a cold step and ``cell.steps`` warm ones."""
    with Recorder(directory, overwrite=True) as recorder:
        engine = Engine(
            model,
            cell.sparse,
            method=cell.method,
            slots=cell.slots,
            policy=cell.policy,
            max_batch=cell.batch,
            recorder=recorder,
        )
        for row in range(cell.batch):
            engine.resume(states[row % len(states)])
        engine.run()
    trace = Trace.open(directory)
    memory = engine.memory
    allocated = {
        "slot_bytes": memory.device_kv_bytes,
        "context_bytes": memory.context.allocated_bytes,
        "host_pool_bytes": memory.host_pool_bytes,
    }
    return CellRun(trace, warm_times(trace), allocated)


def warm_times(trace: Trace) -> CellTimes:
    """What one run's trace says about its warm steps. HardwareError where it has none, or no phase times."""
    table = trace.table("steps").to_pandas()
    rows = trace.selections
    table = table[~table["step"].isin(np.unique(rows.step[rows.cold]))]
    whole = table[table["layer"] == WHOLE_STEP_LAYER]
    if not len(whole) or whole[[*PHASES, "time_us"]].isna().to_numpy().any():
        raise HardwareError(f"{trace.directory} has no warm step with phase times; record one on the CPU engine")
    phases = {name: float(whole[name].mean()) for name in PHASES}
    step_us = float(whole["time_us"].mean())
    return CellTimes(step_us, phases, step_us - sum(phases.values()), (step_us,))


def measure_cells(
    model: LlamaModel,
    cells: Sequence[EngineCell],
    directory: Path,
    *,
    runs: int,
    seed: int,
    heard: Callable[[int], None] = lambda n_done: None,
) -> list[CellRun | NosaError]:
    """The fastest of ``runs`` runs of every cell, or the error that stopped it; ``heard`` gets the runs done.

    Runs go round the cells, so that a spell of other load on the machine takes one run of several cells, not every
    run of one. The misses of a cell's runs are equal, since they decode the same tokens: held here.
    """
    found: list[list[CellRun]] = [[] for _ in cells]
    errors: dict[int, NosaError] = {}
    states: dict[int, list[SequenceState]] = {}
    for turn in range(runs):
        for index, cell in enumerate(cells):
            try:
                if index not in errors:
                    if turn == 0:
                        states[index] = prefilled(model, cell, seed + index)
                    found[index].append(run_cell(model, cell, states[index], directory / f"cell-{index}-run-{turn}"))
            except NosaError as error:
                errors[index] = error
            heard(turn * len(cells) + index + 1)
    return [errors[index] if index in errors else _fastest(own) for index, own in enumerate(found)]


def _fastest(found: list[CellRun]) -> CellRun | NosaError:
    moved = {traffic(run.trace) for run in found}
    if len(moved) > 1:
        return HardwareError(f"runs of one cell moved different bytes: {sorted(moved)}")
    best = min(found, key=lambda run: run.times.step_us)
    times = dataclasses.replace(best.times, run_us=tuple(run.times.step_us for run in found))
    return dataclasses.replace(best, times=times)


def traffic(trace: Trace) -> tuple[int, int]:
    """(h2d, d2h) bytes of all decode steps of a run, as the engine recorded them in its steps."""
    table = trace.table("steps").to_pandas()
    whole = table[table["layer"] == WHOLE_STEP_LAYER]
    return int(whole["h2d_bytes"].sum()), int(whole["d2h_bytes"].sum())
