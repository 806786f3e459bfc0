"""Validation recipes: which engine cells to measure and predict, and how far apart the two may be. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, StrictFloat, StrictInt, StrictStr, field_validator, model_validator

from nosa_sys.errors import NosaError
from nosa_sys.methods import get_method
from nosa_sys.simulator.recipe import (
    Count,
    CountOrZero,
    Slots,
    StrictModel,
    check_keys,
    read_recipe_file,
    slots_of,
)
from nosa_sys.sparse_config import SparseConfig

Error = Annotated[StrictFloat | StrictInt, Field(gt=0, allow_inf_nan=False)]


class CellRecipe(StrictModel):
    """One cell. ``context`` is the prompt in tokens; ``slots`` a count, or a multiple of topk (default: topk)."""

    batch: Count
    topk: Count
    context: Count
    method: StrictStr = "nosa"
    block_size: Count = 64
    window_size: Count = 128
    init_blocks: CountOrZero = 1
    select_blocks: CountOrZero | None = None
    slots: Slots | None = None
    policy: StrictStr | None = None

    @model_validator(mode="after")
    def _consistent(self) -> CellRecipe:
        try:
            get_method(self.method).check(self.sparse())
        except NosaError as error:
            raise ValueError(str(error)) from None
        if self.slots is not None:
            slots_of(self.slots, self.topk)
        return self

    def sparse(self) -> SparseConfig:
        """The budgets; a quarter of topk is selected by the query where the recipe does not say."""
        return SparseConfig(
            block_size=self.block_size,
            topk=self.topk,
            window_size=self.window_size,
            init_blocks=self.init_blocks,
            select_blocks=self.topk // 4 if self.select_blocks is None else self.select_blocks,
        )

    def n_slots(self) -> int | None:
        """Slots a head, None for dense attention, which has no slots."""
        if get_method(self.method).dense:
            return None
        return self.topk if self.slots is None else slots_of(self.slots, self.topk)


class Thresholds(StrictModel):
    """Relative errors of the step time above which validation fails; null: not held."""

    median: Error = 0.15
    p90: Error | None = None
    worst: Error | None = None


class ValidationRecipe(StrictModel):
    """A whole validation. The model has random weights unless ``model`` names one; ``n_layers`` shortens the shape.

    Each cell runs ``runs`` times, ``steps`` warm steps each; the fastest run counts.
    """

    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
    description: StrictStr = ""
    model_shape: StrictStr = "smollm2-135m"
    model: StrictStr | None = None
    n_layers: Count | None = None
    hardware: StrictStr | None = None
    threads: Count = 1
    runs: Count = 5
    steps: Count = 4
    seed: CountOrZero = 0
    thresholds: Thresholds = Thresholds()
    cells: list[CellRecipe]

    @field_validator("cells")
    @classmethod
    def _not_empty(cls, cells: list[CellRecipe]) -> list[CellRecipe]:
        if not cells:
            raise ValueError("give at least one cell")
        return cells

    @model_validator(mode="after")
    def _one_model(self) -> ValidationRecipe:
        if self.model is not None and self.n_layers is not None:
            raise ValueError("n_layers shortens a random model; leave it out with model")
        return self


def load_validation_recipe(path: str | Path) -> ValidationRecipe:
    """Read and check a recipe; ConfigError names the file and the key at fault, with the nearest known one."""
    children: dict[str, type[BaseModel]] = {"cells": CellRecipe, "thresholds": Thresholds}
    return check_keys(ValidationRecipe, read_recipe_file(path), str(path), children)
