"""What calibration runs measured of compute, as sums of the engine's terms: one linear equation an observation.

A step without copies is a sum over its launches, whatever the schedule, so that phases and whole steps of every
schedule are fitted together. Sizes are those of `simulator.engine_cost`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nosa_sys.errors import HardwareError
from nosa_sys.model_shape import ModelShape
from nosa_sys.profiling.engine_gpu_run import GpuRun
from nosa_sys.simulator.engine_cost import (
    attention_ctas,
    attention_features,
    head_matrix,
    layer_matrices,
    logits_mb,
    merge_mb,
    rest_mb,
    select_features,
)
from nosa_sys.simulator.engine_terms import MatrixTimes
from nosa_sys.simulator.workload import second_half
from nosa_sys.traces.miss_table import LayerStepMisses

SELECT = (
    "select_fixed_us",
    "select_score_us",
    "select_us_per_head",
    "select_us_per_block",
    "select_us_per_compare",
    "select_us_per_mb",
)
ATTENTION = ("attention_us_per_mb", "attention_us_per_small_mb")
CTAS = "attention_us_per_cta"
REST = ("rest_fixed_us", "rest_matrix_scale", "rest_us_per_mb")
FRAME = ("step_fixed_us", "step_head_scale", "step_us_per_mb")
FIXED = ("append_us", "attention_fixed_us", "dense_attention_fixed_us", "merge_fixed_us")
COLUMNS = (*FIXED, *SELECT, *ATTENTION, CTAS, *REST, *FRAME)
_LEAST_US = 0.1
# CTAs of attention that run at once: two on each of the 132 SMs of an H200.
ATTENTION_PLACES = 264

Sizes = dict[str, float]


@dataclass(frozen=True)
class Observation:
    """``us`` measured of ``what`` in run number ``run``, and how often it holds each term."""

    run: int
    what: str
    us: float
    sizes: Sizes


def observations(
    runs: Sequence[GpuRun], shapes: Mapping[str, ModelShape], matrices: Sequence[MatrixTimes]
) -> list[Observation]:
    """Phases of a layer and whole steps without copies of all runs."""
    found = []
    for index, run in enumerate(runs):
        design = _Design(run, shapes[run.setting.model_shape], matrices)
        for part, us in run.phase_us.items():
            found.append(Observation(index, part, max(_LEAST_US, us), design.phase(part)))
        for schedule, us in run.compute_us.items():
            found.append(Observation(index, f"step {schedule}", us, design.step(schedule)))
    return found


def values(found: Sequence[Observation]) -> np.ndarray:
    """[observation, column]"""
    return np.array([[o.sizes.get(name, 0.0) for name in COLUMNS] for o in found])


class _Design:
    """Sizes of one run's launches."""

    def __init__(self, run: GpuRun, shape: ModelShape, matrices: Sequence[MatrixTimes]) -> None:
        self._setting, self._shape, self._matrices = run.setting, shape, matrices
        loads, first = run.warm("fused_kv")
        self._whole = loads
        self._halves = [first, second_half(loads, first)] if run.setting.batch > 1 else [loads]

    def phase(self, part: str) -> Sizes:
        return {"select": self._select, "attention": self._attention, "other": self._rest}[part](self._whole)

    def step(self, schedule: str) -> Sizes:
        shape, n = self._shape, self._rows(self._whole)
        step = {
            "step_fixed_us": 1.0,
            "step_head_scale": self._time(head_matrix(shape), n),
            "step_us_per_mb": logits_mb(shape, n).item(),
        }
        for loads in self._halves if schedule == "two_batch" else [self._whole]:
            for sizes in (self._select(loads), self._attention(loads), self._rest(loads)):
                _add(step, sizes, shape.n_layers)
        if schedule == "split_merge" and not self._setting.dense:
            again = {
                "attention_fixed_us": 1.0,
                "merge_fixed_us": 1.0,
                "attention_us_per_mb": merge_mb(shape, n).item(),
                CTAS: self._ctas(self._whole),
            }
            _add(step, again, shape.n_layers)
        return step

    def _rows(self, loads: LayerStepMisses) -> np.ndarray:
        return loads.n_sequences[:1]

    def _select(self, loads: LayerStepMisses) -> Sizes:
        setting = self._setting
        if setting.dense:
            return {"append_us": 1.0}
        context = np.array([float(loads.context_tokens.mean())])
        sizes = select_features(self._shape, setting.sparse, setting.method, setting.slots, self._rows(loads), context)
        return dict(zip(SELECT, (1.0, *map(float, sizes[0])), strict=True))

    def _attention(self, loads: LayerStepMisses) -> Sizes:
        block = self._setting.block_size
        attended = np.array(float(loads.attended_blocks.mean()))
        sizes = attention_features(attended, self._shape.kv_block_bytes(block), block)
        fixed = "dense_attention_fixed_us" if self._setting.dense else "attention_fixed_us"
        return {fixed: 1.0, CTAS: self._ctas(loads), **dict(zip(ATTENTION, map(float, sizes), strict=True))}

    def _ctas(self, loads: LayerStepMisses) -> float:
        context = np.array([float(loads.context_tokens.mean())])
        sparse, method = self._setting.sparse, self._setting.method
        return float(attention_ctas(self._shape, sparse, method, self._rows(loads), context, ATTENTION_PLACES)[0])

    def _rest(self, loads: LayerStepMisses) -> Sizes:
        rows = self._rows(loads)
        us = sum(self._time(n_k, rows) for n_k in layer_matrices(self._shape))
        return dict(zip(REST, (1.0, us, rest_mb(self._shape, rows).item()), strict=True))

    def _time(self, n_k: tuple[int, int], rows: np.ndarray) -> float:
        found = next((m for m in self._matrices if (m.n, m.k) == n_k), None)
        if found is None:
            raise HardwareError(
                f"the matrix {n_k[0]} x {n_k[1]} was not timed; time it before calibrating on its model"
            )
        return float(found.at(rows)[0])


def _add(total: Sizes, sizes: Sizes, times: int) -> None:
    for name, size in sizes.items():
        total[name] = total.get(name, 0.0) + times * size
