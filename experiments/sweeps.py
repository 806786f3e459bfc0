"""Sweeps for the CLI and the demo: what may be overwritten, and recipes shipped with the package. Loads no torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nosa_sys.errors import ConfigError
from nosa_sys.simulator.recipe import BaseRecipe, Recipe, load_recipe
from nosa_sys.simulator.sweep import sweep
from nosa_sys.simulator.sweep_results import SUMMARY_FILE

_RECIPES = Path(__file__).parent


def shipped_recipe(name: str, *, trace: Path, seed: int) -> Recipe:
    """A recipe of this folder on another trace."""
    recipe = load_recipe(_RECIPES / name)
    return recipe.model_copy(update={"base": BaseRecipe(trace=str(trace)), "seed": seed})


def check_sweep_output(recipe: Recipe, out: Path, *, overwrite: bool) -> None:
    """Same recipe: resume or replace. Another recipe's results need ``overwrite``; foreign files are refused."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; give a directory")
    if not out.is_dir() or not any(out.iterdir()):
        return
    summary = out / SUMMARY_FILE
    if not summary.is_file():
        if (out / ".resume").is_dir():
            return
        raise ConfigError(f"{out} holds files that nosa did not write; choose another --out")
    try:
        before = json.loads(summary.read_text(encoding="utf-8")).get("recipe")
    except (ValueError, AttributeError):
        before = None
    if before != recipe.model_dump(mode="json", exclude_none=True):
        if not overwrite:
            raise ConfigError(f"{out} holds the results of another recipe; give --overwrite, or another --out")
        shutil.rmtree(out)


def run_sweep(
    recipe: Recipe, out: Path, *, workers: int, progress: Callable[[str, int, int], None], backend: str = "joblib"
) -> dict[str, Any]:
    """Run and return a short summary; the full one is in summary.json."""
    result = sweep(
        recipe,
        out,
        workers=workers,
        backend=backend,
        progress=lambda done, total, _: progress("sweep", done, total),
    )
    summary = result.summary
    best = summary["best_tokens_per_s"]
    names = ("model_shape", "method", "batch", "slots", "policy", "h2d_gbps", "tokens_per_s", "limited_by", "status")
    return {
        "kind": "sweep",
        "out": str(out),
        "name": summary["name"],
        "n_configurations": summary["n_configurations"],
        "n_refused": summary["n_refused"],
        "n_extrapolated": summary["n_extrapolated"],
        "n_over_memory": summary["n_over_memory"],
        "status": summary["status"],
        "limited_by": summary["limited_by"],
        "best": None if best is None else {name: best[name] for name in names},
        "results_sha256": summary["results_sha256"],
    }
