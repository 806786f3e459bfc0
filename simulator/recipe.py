"""Sweep recipes: what to vary and what to keep, read from YAML with every unknown key refused."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    ValidationError,
    field_validator,
    model_validator,
)

from nosa_sys.errors import ConfigError
from nosa_sys.simulator.locality.registry import get_locality
from nosa_sys.simulator.locality_model import LocalityModel, ScoreModel
from nosa_sys.simulator.schedules import Schedule, get_schedule
from nosa_sys.slot_count import slots_of
from nosa_sys.yaml_numbers import safe_load

MAX_RECIPE_BYTES = 2**20
MAX_CONFIGURATIONS = 1_000_000
Model = TypeVar("Model", bound=BaseModel)

Count = Annotated[StrictInt, Field(ge=1, le=2**31 - 1)]
CountOrZero = Annotated[StrictInt, Field(ge=0, le=2**31 - 1)]
Gbps = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
Number = Annotated[float, Field(allow_inf_nan=False, strict=True)]
# A whole number is a count of slots; a fraction, or text such as 1.25x, is a multiple of topk.
Slots = StrictInt | Number | StrictStr


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SparseRecipe(StrictModel):
    """Budgets of the base configuration, as in SparseConfig; what is left out keeps its default there."""

    block_size: Count | None = None
    kernel_size: Count | None = None
    kernel_stride: Count | None = None
    topk: Count | None = None
    init_blocks: CountOrZero | None = None
    window_size: Count | None = None
    select_blocks: CountOrZero | None = None


class LocalityRecipe(StrictModel):
    """Parameters of the locality model; what is left out keeps its default there."""

    popularity_spread: Number | None = None
    slow_correlation: Number | None = None
    fast_spread: Number | None = None
    fast_tilt: Number | None = None
    stream_spread: Number | None = None
    beta_correlation: Number | None = None
    part_correlation: Number | None = None

    def build(self) -> LocalityModel:
        return LocalityModel(**self.model_dump(exclude_none=True))


class SyntheticRecipe(StrictModel):
    """A workload of a locality model: the name of one (fitted:NAME), or parameters of the simple one."""

    model_shape: StrictStr
    context: Count
    batch: Count = 1
    steps: Count = 64
    method: StrictStr = "nosa"
    sparse: SparseRecipe = SparseRecipe()
    locality: LocalityRecipe | StrictStr = LocalityRecipe()
    distinct_sequences: Count = 4

    def build_locality(self) -> ScoreModel:
        return get_locality(self.locality) if isinstance(self.locality, str) else self.locality.build()


class BaseRecipe(StrictModel):
    """Where misses come from: exactly one of a trace (a directory, relative to the current one) and synthetic."""

    trace: StrictStr | None = None
    synthetic: SyntheticRecipe | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> BaseRecipe:
        if (self.trace is None) == (self.synthetic is None):
            raise ValueError("give exactly one of trace and synthetic")
        return self


class Axes(StrictModel):
    """Values to combine, each with each. The order of fields is the order of rows: the last one varies fastest."""

    model_shape: list[StrictStr] | None = None
    method: list[StrictStr] | None = None
    block_size: list[Count] | None = None
    topk: list[Count] | None = None
    k_e: list[CountOrZero] | None = None
    select_blocks: list[CountOrZero] | None = None
    context: list[Count] | None = None
    slots: list[Slots] | None = None
    policy: list[StrictStr] | None = None
    batch: list[Count] | None = None
    hardware: list[StrictStr] | None = None
    link: list[StrictStr] | None = None
    h2d_gbps: list[Gbps] | None = None
    host_kv_dtype: list[StrictStr] | None = None

    @field_validator("*")
    @classmethod
    def _not_empty(cls, values: list[Any] | None) -> list[Any] | None:
        if values is not None and not values:
            raise ValueError("an axis needs at least one value")
        return values

    @field_validator("slots")
    @classmethod
    def _slots_readable(cls, values: list[Any] | None) -> list[Any] | None:
        for value in values or []:
            slots_of(value, 1)
        return values

    @model_validator(mode="after")
    def _one_way_to_share(self) -> Axes:
        if self.k_e is not None and self.select_blocks is not None:
            raise ValueError("k_e and select_blocks set the same thing (select_blocks = topk - k_e): give one of them")
        return self

    def given(self) -> dict[str, list[Any]]:
        """The axes in use, in their fixed order."""
        return {name: list(v) for name in type(self).model_fields if (v := getattr(self, name)) is not None}


class Range(StrictModel):
    """Values between two ends, drawn evenly, or with ``log`` evenly in their logarithm; whole ones for whole axes."""

    low: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    high: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    log: bool = False

    @model_validator(mode="after")
    def _in_order(self) -> Range:
        if self.low >= self.high:
            raise ValueError(f"low={self.low:g} must be below high={self.high:g}")
        return self

    def at(self, share: float) -> float:
        """The value at a share of the way, in [0, 1]."""
        if self.log:
            return float(self.low * (self.high / self.low) ** share)
        return float(self.low + (self.high - self.low) * share)


_WHOLE_RANGES = ("topk", "context", "batch")
_MAX_COUNT = 2**31 - 1


class Sobol(StrictModel):
    """Instead of every combination, ``points`` of a scrambled Sobol sequence of the recipe's seed.

    A dimension each for the axes (each value as often as any other) and for the ``ranges``: topk, context, batch,
    slots (a multiple of topk) and h2d_gbps may have one.
    """

    points: Annotated[StrictInt, Field(ge=1, le=MAX_CONFIGURATIONS)]
    topk: Range | None = None
    context: Range | None = None
    slots: Range | None = None
    batch: Range | None = None
    h2d_gbps: Range | None = None

    @field_validator(*_WHOLE_RANGES)
    @classmethod
    def _countable(cls, limits: Range | None) -> Range | None:
        if limits is not None and not (limits.low >= 1 and limits.high <= _MAX_COUNT):
            raise ValueError(f"low={limits.low:g} and high={limits.high:g} must be in [1, {_MAX_COUNT}]")
        return limits

    def ranges(self) -> dict[str, Range]:
        """The ranges in use, in their fixed order."""
        names = [name for name in type(self).model_fields if name != "points"]
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Recipe(StrictModel):
    """A whole sweep. ``steps`` is the number of decode steps to simulate (default: those of the base)."""

    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
    description: StrictStr = ""
    base: BaseRecipe
    hardware: StrictStr | None = None
    link: StrictStr | None = None
    h2d_gbps: Gbps | None = None
    host_kv_dtype: StrictStr | None = None
    dequant_gbps: Gbps | None = None
    dequant_fixed_us: Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)] | None = None
    extrapolate: bool = False
    schedule: StrictStr = "serial"
    prefetch_blocks: Count | None = None
    prefetch_hit_share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)] | None = None
    steps: Count | None = None
    seed: CountOrZero = 0
    axes: Axes = Axes()
    sobol: Sobol | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if (self.hardware is None) == (self.axes.hardware is None):
            raise ValueError("give hardware either once for the sweep or as an axis")
        for name in ("link", "h2d_gbps", "host_kv_dtype"):
            if getattr(self, name) is not None and name in self.names():
                raise ValueError(f"give {name} either once for the sweep or as an axis, not both")
        if not self.names():
            raise ValueError("axes: give at least one axis, or a range of sobol")
        twice = sorted(set(self.axes.given()) & set(self.sobol.ranges() if self.sobol else ()))
        if twice:
            raise ValueError(f"{twice[0]} is an axis and a range of sobol: give one of them")
        if (
            "host_kv_dtype" not in self.names()
            and self.host_kv_dtype is None
            and (self.dequant_gbps or self.dequant_fixed_us)
        ):
            raise ValueError("dequant_gbps and dequant_fixed_us need host_kv_dtype, as int4")
        try:
            self.resolved_schedule()
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if self.n_configurations > MAX_CONFIGURATIONS:
            raise ValueError(f"{self.n_configurations} configurations exceed the limit of {MAX_CONFIGURATIONS}")
        return self

    def resolved_schedule(self) -> Schedule:
        """The schedule that prices every configuration."""
        return get_schedule(
            self.schedule, prefetch_blocks=self.prefetch_blocks, prefetch_hit_share=self.prefetch_hit_share
        )

    def names(self) -> list[str]:
        """What varies, in the order of the columns of a configuration."""
        return [*self.axes.given(), *(self.sobol.ranges() if self.sobol else ())]

    @property
    def n_configurations(self) -> int:
        if self.sobol is not None:
            return self.sobol.points
        return math.prod(len(values) for values in self.axes.given().values())

    def configurations(self) -> Iterator[dict[str, Any]]:
        """Axis values of every configuration: each with each, the last varying fastest, or Sobol points in order."""
        axes = self.axes.given()
        if self.sobol is None:
            for combination in itertools.product(*axes.values()):
                yield dict(zip(axes, combination, strict=True))
            return
        from scipy.stats import qmc

        ranges = self.sobol.ranges()
        sequence = qmc.Sobol(len(axes) + len(ranges), scramble=True, rng=np.random.default_rng(self.seed))
        # a power of two keeps the sequence balanced; what is too much of it is cut off
        points = sequence.random_base2(max(0, (self.sobol.points - 1).bit_length()))[: self.sobol.points]
        for point in points:
            values: dict[str, Any] = {}
            for share, (name, given) in zip(point, axes.items(), strict=False):
                values[name] = given[min(len(given) - 1, int(share * len(given)))]
            for share, (name, limits) in zip(point[len(axes) :], ranges.items(), strict=True):
                value = limits.at(float(share))
                values[name] = round(value) if name in _WHOLE_RANGES else value
            yield values


def load_recipe(path: str | Path) -> Recipe:
    """Read and check a recipe; ConfigError names the file and the key at fault, with the nearest known one."""
    return parse_recipe(read_recipe_file(path), str(path))


def read_recipe_file(path: str | Path) -> Any:
    """The YAML of a recipe of any kind, not checked yet; ConfigError where it cannot be read."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_RECIPE_BYTES:
            raise ConfigError(f"{path} has {path.stat().st_size} bytes, more than the limit of {MAX_RECIPE_BYTES}")
        return safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read recipe {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())[:300]}") from None


def parse_recipe(data: Any, source: str = "recipe") -> Recipe:
    """Check parsed YAML; see `load_recipe`."""
    return check_keys(Recipe, data, source, _CHILDREN)


def check_keys(kind: type[Model], data: Any, source: str, children: Mapping[str, type[BaseModel]]) -> Model:
    """Parsed YAML as a recipe of ``kind``; ``children`` are the models below it by key, for the nearest known key."""
    if not isinstance(data, dict):
        raise ConfigError(f"{source} must hold a mapping of keys, not {type(data).__name__}")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_first_fault(error, kind, children)}") from None


def _first_fault(error: ValidationError, kind: type[BaseModel], children: Mapping[str, type[BaseModel]]) -> str:
    # An unknown key explains what is missing elsewhere, so it comes first.
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    fault = next((f for f in faults if f["type"] == "extra_forbidden"), faults[0])
    where = ".".join(str(part) for part in fault["loc"]) or "recipe"
    if fault["type"] != "extra_forbidden":
        return f"{where}: {fault['msg'].removeprefix('Value error, ')}"
    model = kind
    for part in fault["loc"][:-1]:
        model = children.get(str(part), model)
    known = list(model.model_fields)
    near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1, cutoff=0.0)
    return f"unknown key {where!r}; did you mean {near[0]!r}? known here: {', '.join(known)}"


_CHILDREN: Mapping[str, type[BaseModel]] = {
    "base": BaseRecipe,
    "synthetic": SyntheticRecipe,
    "sparse": SparseRecipe,
    "locality": LocalityRecipe,
    "axes": Axes,
    "sobol": Sobol,
    **dict.fromkeys(("topk", "context", "slots", "batch", "h2d_gbps"), Range),
}
