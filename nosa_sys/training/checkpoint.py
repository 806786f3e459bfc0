"""Checkpoints of a training run: tensors as safetensors, everything else as JSON; nothing that can run code."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nosa_sys.errors import CheckpointError, ConfigError
from nosa_sys.models.safetensors_reader import CheckpointTensors

TENSORS, STATE = "state.safetensors", "state.json"
_DIRECTORY = re.compile(r"checkpoint-(\d{1,12})")
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk: after ``step`` steps, with what ``save`` was given as ``state``."""

    path: Path
    step: int
    state: dict[str, Any]


def save(
    directory: Path, step: int, parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> Path:
    """Write ``directory``/checkpoint-STEP in one rename, then remove the older ones.

    ``parameters`` are those of the optimizer, by name."""
    tensors = {}
    for name, parameter in parameters.items():
        tensors[f"parameter.{name}"] = parameter.detach()
        moments = optimizer.state[parameter]
        for moment in _MOMENTS:
            tensors[f"{moment}.{name}"] = moments[moment]
    path = directory / f"checkpoint-{step}"
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, partial / TENSORS)
    (partial / STATE).write_text(json.dumps({"step": step, **state}, indent=1), encoding="utf-8")
    shutil.rmtree(path, ignore_errors=True)
    os.replace(partial, path)
    for old in _found(directory):
        if old != path:
            shutil.rmtree(old)
    return path


def latest(directory: Path) -> Saved | None:
    """The last whole checkpoint of a run, None when there is none; CheckpointError for one that cannot be read."""
    found = sorted(_found(directory), key=_step)
    if not found:
        return None
    path = found[-1]
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        return Saved(path, int(state["step"]), state)
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / STATE} is no state of a training run: {error}") from None


def _found(directory: Path) -> list[Path]:
    return [path for path in directory.glob("checkpoint-*") if _DIRECTORY.fullmatch(path.name)]


def _step(path: Path) -> int:
    return int(path.name.split("-")[1])


@torch.no_grad()
def restore(saved: Saved, parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint's values into ``parameters`` and ``optimizer``, bit for bit.

    Raises CheckpointError for a tensor that is missing or of another shape."""
    tensors = CheckpointTensors.open_file(saved.path / TENSORS)
    for name, parameter in parameters.items():
        size = tuple(parameter.shape)
        parameter.copy_(tensors.take(f"parameter.{name}", size))
        moments = {moment: tensors.take(f"{moment}.{name}", size).to(parameter.device) for moment in _MOMENTS}
        step = torch.tensor(float(saved.step), device=parameter.device if optimizer.defaults["fused"] else "cpu")
        optimizer.state[parameter] = {"step": step, **moments}


def check_same(saved: Saved, key: str, mine: dict[str, Any]) -> None:
    """ConfigError naming the first value of ``mine`` that differs from the saved state's ``key``."""
    theirs = saved.state.get(key)
    for name, value in mine.items():
        found = theirs.get(name) if isinstance(theirs, dict) else None
        if found != value:
            raise ConfigError(
                f"{saved.path} was made with {key} {name}={found!r}, this run has {value!r}; "
                "use the same recipe and texts, or start anew with --overwrite"
            )
