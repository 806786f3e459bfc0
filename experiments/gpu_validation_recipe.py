"""Recipes of `nosa validate` on a GPU: how many settings to draw, out of which ranges, and the errors allowed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field, StrictStr, model_validator

from nosa_sys.experiments.validation_recipe import Thresholds
from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.profiling.engine_gpu import SPARE_TOKENS
from nosa_sys.profiling.engine_gpu_run import Length
from nosa_sys.profiling.engine_gpu_setting import GpuSetting, slots_for
from nosa_sys.simulator.recipe import Count, CountOrZero, StrictModel, check_keys, read_recipe_file

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# Contexts are multiples of this, less SPARE_TOKENS: 32 blocks of the largest size.
_CONTEXT_STEP = 4096
_MOST_DRAWS = 1024


class Ranges(StrictModel):
    """What settings are drawn from. ``batch``, ``context`` (tokens) and ``miss_share`` (of k): low and high, drawn on a
    logarithmic scale; the others in turn, methods by weight."""

    batch: tuple[Count, Count] = (1, 128)
    context: tuple[Count, Count] = (8192, 131072)
    k_tokens: tuple[Count, ...] = (1024, 2048, 4096, 8192)
    block_size: tuple[Count, ...] = (32, 64, 128)
    slot_factor: tuple[Positive, ...] = (1.0, 1.25, 1.5, 2.0)
    miss_share: tuple[Positive, Positive] = (0.01, 0.2)
    methods: dict[StrictStr, Positive] = {"nosa": 5, "infllmv2": 2, "dma": 1, "full": 1}  # noqa: RUF012
    kernel_stride: Count = 16

    @model_validator(mode="after")
    def _consistent(self) -> Ranges:
        for name in ("batch", "context", "miss_share"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name}={[low, high]} must be a low and a high value")
        for name in self.methods:
            get_method(name)
        return self


class GpuRecipe(StrictModel):
    """A validation on a GPU. ``settings``: how many are drawn for each model shape, each measured under every schedule
    of the engine (a cell each). ``gpu_gib`` and ``host_gib`` bound what a setting's KV may take. ``traces``:
    directories whose recorded sets make a setting each, of ``trace_batch`` rows, on the first shape."""

    kind: Literal["gpu"]
    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
    description: StrictStr = ""
    settings: dict[StrictStr, Count]
    hardware: StrictStr = "h200"
    ranges: Ranges = Ranges()
    traces: tuple[StrictStr, ...] = ()
    trace_batch: Count = 16
    windows: Count = 3
    steps: Count = 24
    part_steps: Count = 8
    gpu_gib: Positive = 120.0
    host_gib: Positive = 40.0
    seed: CountOrZero = 0
    max_minutes: Positive = 4.0
    thresholds: Thresholds = Thresholds(median=0.02, p90=0.05)

    @property
    def length(self) -> Length:
        return Length(windows=self.windows, steps=self.steps, part_steps=self.part_steps)


def is_gpu_recipe(path: Path) -> bool:
    """Whether a recipe asks for a GPU (key ``kind: gpu``)."""
    data = read_recipe_file(path)
    return isinstance(data, dict) and data.get("kind") == "gpu"


def load_gpu_recipe(path: str | Path) -> GpuRecipe:
    """Read and check a recipe; ConfigError names the file and the key at fault."""
    children: dict[str, type[BaseModel]] = {"ranges": Ranges, "thresholds": Thresholds}
    return check_keys(GpuRecipe, read_recipe_file(path), str(path), children)


def draw_settings(recipe: GpuRecipe, shape: ModelShape, taken: list[dict[str, Any]]) -> list[GpuSetting]:
    """The first settings of a seeded Sobol sequence that fit and that calibration did not use (``taken``)."""
    from scipy.stats import qmc

    wanted = recipe.settings[shape.name]
    n_steps = recipe.length.total(4)
    found: list[GpuSetting] = []
    for point in qmc.Sobol(7, seed=recipe.seed + sum(shape.name.encode())).random(_MOST_DRAWS):
        setting = _setting(recipe, shape, point)
        roomy = setting.fits(shape, n_steps, gpu_bytes=recipe.gpu_gib * 2**30, host_bytes=recipe.host_gib * 2**30)
        dense_bytes = setting.required(shape, n_steps)["device_pool_bytes"]
        repeated = setting.key() in taken or any(setting.key() == other.key() for other in found)
        if roomy and dense_bytes <= recipe.host_gib * 2**30 and not repeated:
            found.append(setting)
        if len(found) == wanted:
            break
    return found


def trace_settings(recipe: GpuRecipe, shape: ModelShape) -> list[GpuSetting]:
    """A setting for each trace of the recipe, on its first shape; TraceError for one that cannot be read."""
    if shape.name != next(iter(recipe.settings)):
        return []
    return [GpuSetting.of_trace(shape.name, Path(trace), recipe.trace_batch, recipe.seed) for trace in recipe.traces]


def _setting(recipe: GpuRecipe, shape: ModelShape, point: np.ndarray) -> GpuSetting:
    ranges = recipe.ranges

    def logarithmic(x: float, bounds: tuple[float, float]) -> float:
        return math.exp(math.log(bounds[0]) + x * math.log(bounds[1] / bounds[0]))

    def one_of(x: float, values: tuple[Any, ...]) -> Any:
        return values[min(len(values) - 1, int(x * len(values)))]

    names, weights = list(ranges.methods), np.cumsum(list(ranges.methods.values()))
    method = names[int(np.searchsorted(weights, point[6] * weights[-1], side="right").clip(max=len(names) - 1))]
    block, k_tokens = one_of(point[1], ranges.block_size), one_of(point[2], ranges.k_tokens)
    step = _CONTEXT_STEP if ranges.context[0] >= _CONTEXT_STEP else 1
    nominal = logarithmic(point[3], ranges.context)
    context = max(1, round(nominal / step)) * step - (SPARE_TOKENS if step > 1 else 0)
    topk = k_tokens // block
    misses = 0.0 if method in ("full", "dma") else topk * logarithmic(point[5], ranges.miss_share)
    return GpuSetting(
        model_shape=shape.name,
        method=method,
        batch=round(logarithmic(point[0], ranges.batch)),
        context=context,
        block_size=block,
        topk=topk,
        slots=slots_for(topk, one_of(point[4], ranges.slot_factor)),
        misses=round(misses, 3),
        kernel_stride=ranges.kernel_stride,
        seed=recipe.seed,
    )
