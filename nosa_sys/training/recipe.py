"""Training recipes: one flat set of keys, and runs and seeds that vary it; checked key by key."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nosa_sys.errors import ConfigError, NosaError
from nosa_sys.methods import HEADS, get_method
from nosa_sys.sparse_config import SparseConfig

T = TypeVar("T")
SCHEDULES = ("cosine", "constant")
TRAINED = ("head", "all", "low_rank")
ATTENTION_NAMES = ("sdpa", "flex", "triton")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def build(kind: type[T], data: Mapping[str, Any], source: str) -> T:
    """A dataclass out of a mapping whose values have the fields' types; ConfigError names ``source`` and the key.

    Whole numbers serve as floats; a mapping serves for a SparseConfig."""
    hints = typing.get_type_hints(kind)
    values = {}
    for key, value in data.items():
        if key not in hints:
            raise ConfigError(f"{source}: unknown key {key!r}; known: {', '.join(sorted(hints))}")
        values[key] = _typed(hints[key], value, f"{source}: {key}")
    for entry in dataclasses.fields(kind):  # type: ignore[arg-type]
        needed = entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        if needed and entry.name not in values:
            raise ConfigError(f"{source}: {entry.name} is missing")
    try:
        return kind(**values)
    except NosaError as error:
        raise ConfigError(f"{source}: {error}") from None


def _typed(hint: Any, value: Any, where: str) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if option is type(None) and value is None:
            return None
        if option is SparseConfig and isinstance(value, Mapping):
            try:
                return SparseConfig.from_dict(dict(value))
            except NosaError as error:
                raise ConfigError(f"{where}: {error}") from None
        if typing.get_origin(option) is tuple and isinstance(value, list):
            return tuple(_typed(typing.get_args(option)[0], item, where) for item in value)
        if option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(option, type) and isinstance(value, option) and isinstance(value, bool) == (option is bool):
            return value
    names = " or ".join("nothing" if o is type(None) else getattr(o, "__name__", str(o)) for o in options)
    raise ConfigError(f"{where}={value!r} must be of type {names}")


def check_ranges(owner: Any, **lowest: float) -> None:
    """ConfigError for the first named field below its lowest value."""
    for name, low in lowest.items():
        if not getattr(owner, name) >= low:
            raise ConfigError(f"{name}={getattr(owner, name)} must be >= {low:g}")


def check_name(name: str) -> None:
    """ConfigError for a name that is no plain file name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"name={name!r} must be letters, digits, '_', '.' and '-', 100 at most")


@dataclass(frozen=True)
class TrainSettings:
    """One training run.

    ``length`` tokens a sequence, ``batch`` sequences a step; ``trained`` head | all | low_rank; ``held_out`` is the
    share of documents kept for the held-out loss, ``held_out_sequences`` how many sequences of them are scored every
    ``evaluate_every`` steps. ``adapter`` and a false ``fresh_head`` go on from a head instead of A = 1, delta
    N(0, 0.02). Learning rates rise over ``warmup_steps`` and then stay (constant) or fall to ``final_share`` of
    themselves (cosine). Gradients are clipped at norm ``clip``, head and weights apart. ``recompute`` makes activations
    again in the backward pass (None: on a CPU; a GPU keeps them, 13 GB at 8K for SmolLM2-135M by estimate).
    """

    name: str
    sparse: SparseConfig = field(default_factory=SparseConfig)
    description: str = ""
    model: str = "smollm2-135m"
    rope_theta: float | None = None
    adapter: str | None = None
    fresh_head: bool = True
    method: str = "nosa"
    head: str = "ed_dma"
    trained: str = "head"
    rank: int = 8
    attention: str = "sdpa"
    recompute: bool | None = None
    length: int = 8192
    batch: int = 1
    steps: int = 260
    streams: int = 8
    held_out: float = 0.05
    held_out_sequences: int = 4
    evaluate_every: int = 50
    checkpoint_every: int = 100
    head_lr: float = 2e-2
    weights_lr: float = 1e-4
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    schedule: str = "cosine"
    warmup_steps: int = 10
    final_share: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        check_name(self.name)
        get_method(self.method).check(self.sparse)
        if self.head not in HEADS:
            raise ConfigError(f"head={self.head!r} must be one of {', '.join(HEADS)}")
        if self.attention not in ATTENTION_NAMES:
            raise ConfigError(f"attention={self.attention!r} must be one of {', '.join(ATTENTION_NAMES)}")
        if self.trained not in TRAINED:
            raise ConfigError(f"trained={self.trained!r} must be one of {', '.join(TRAINED)}")
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"schedule={self.schedule!r} must be one of {', '.join(SCHEDULES)}")
        check_ranges(self, length=2, batch=1, steps=1, streams=1, held_out_sequences=0, evaluate_every=1, seed=0)
        check_ranges(self, checkpoint_every=1, head_lr=0, weights_lr=0, weight_decay=0, warmup_steps=0, final_share=0)
        if not self.clip > 0:
            raise ConfigError(f"clip={self.clip} must be > 0")

    @property
    def directory(self) -> str:
        """Folder of the run inside the output."""
        return f"{self.name}-seed{self.seed}"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


RECIPE_KEYS = (*(entry.name for entry in dataclasses.fields(TrainSettings) if entry.name != "seed"), "runs", "seeds")


def parse_train_recipe(
    data: Mapping[str, Any], source: str, changes: Mapping[str, Any] | None = None
) -> list[TrainSettings]:
    """Every run of a recipe: ``runs`` is a list of keys that replace the recipe's, each with a name; ``seeds`` repeats
    all of them. ``changes`` win over both. Raises ConfigError naming the key at fault."""
    base = {key: value for key, value in data.items() if key not in ("runs", "seeds")}
    runs, seeds = data.get("runs", [{}]), data.get("seeds", [0])
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) for run in runs):
        raise ConfigError(f"{source}: runs must be a list of mappings, one a run")
    if not isinstance(seeds, list) or not seeds:
        raise ConfigError(f"{source}: seeds must be a list of whole numbers")
    made = [
        build(TrainSettings, {**base, **run, **(changes or {}), "seed": seed}, source) for run in runs for seed in seeds
    ]
    names = [settings.directory for settings in made]
    if len(set(names)) < len(names):
        raise ConfigError(f"{source}: two runs are called {max(names, key=names.count)}; give each a name")
    return made
