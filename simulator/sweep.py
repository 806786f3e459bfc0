"""sweep: every configuration of a recipe, on all cores, resumable, the same bytes whatever the number of workers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nosa_sys
from nosa_sys.errors import ConfigError, NosaError
from nosa_sys.model_shape import ModelShape
from nosa_sys.simulator.backends import check_backend, run_jobs
from nosa_sys.simulator.grid import check_grid
from nosa_sys.simulator.locality.fitted import FittedLocality
from nosa_sys.simulator.recipe import Recipe, load_recipe
from nosa_sys.simulator.schedules import Schedule
from nosa_sys.simulator.simulate import open_source, price
from nosa_sys.simulator.sources import Source
from nosa_sys.simulator.sweep_plan import Configuration, Group, base_workload, plan, profiles
from nosa_sys.simulator.sweep_results import RESULTS_FILE, SUMMARY_FILE, predicted_row, refused_row, write_results
from nosa_sys.simulator.workload import Workload
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.schema import TraceMeta, write_text_whole

# (configurations done, configurations in all, seconds left or None while unknown)
Progress = Callable[[int, int, float | None], None]
_RESUME_FOLDER = ".resume"
_ROWS_AT_ONCE = 16384  # step instances priced by one call


@dataclass(frozen=True)
class SweepResult:
    """Where the results are, and the summary that was written."""

    results_path: Path
    summary_path: Path
    summary: dict[str, Any]


def sweep(
    recipe: str | Path | Recipe,
    out: str | Path,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    backend: str = "joblib",
) -> SweepResult:
    """Run a recipe and write ``results.parquet`` and ``summary.json`` under ``out``, each whole or not at all.

    A combination that breaks a rule becomes a row with the reason in ``refused``. Groups that a killed run finished
    are taken from ``out``. ``workers``: processes, all cores by default. ``backend``: joblib (this machine) or ray (a
    cluster: the one of RAY_ADDRESS, else a local one; a trace must lie at the same path on every machine). Files are
    the same to the byte whatever the two are.

    Raises NosaError for a recipe that cannot be run at all.
    """
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    workers = os.cpu_count() or 1 if workers is None else workers
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ConfigError(f"workers={workers!r} must be a whole number >= 1")
    check_backend(backend)
    meta = Trace.open(recipe.base.trace).meta if recipe.base.trace is not None else None
    groups = plan(recipe, meta)
    out = Path(out)
    is_new = not out.exists()
    resume = out / _RESUME_FOLDER / _fingerprint(recipe, meta)
    try:
        resume.mkdir(parents=True, exist_ok=True)
        rows = _collect(recipe, groups, resume, workers, backend, progress)
        if all(row["refused"] for row in rows):
            shutil.rmtree(out if is_new else out / _RESUME_FOLDER)
            raise ConfigError(f"none of the {len(rows)} configurations can be run; the first: {rows[0]['refused']}")
        summary = write_results(out, recipe, rows)
        shutil.rmtree(out / _RESUME_FOLDER)
    except OSError as error:
        raise ConfigError(f"cannot write the sweep to {out}: {error.strerror or error}") from None
    return SweepResult(out / RESULTS_FILE, out / SUMMARY_FILE, summary)


def _collect(
    recipe: Recipe, groups: list[Group], resume: Path, workers: int, backend: str, progress: Progress | None
) -> list[dict[str, Any]]:
    """Rows of all groups in the order of configurations; finished groups are read back instead of run again."""
    total, done, begin, ran = recipe.n_configurations, 0, time.monotonic(), 0
    rows: list[dict[str, Any]] = []
    waiting = []
    for group in groups:
        finished = _read_back(_group_path(resume, group), group)
        if finished is None:
            waiting.append(group)
        else:
            rows += finished
            done += len(finished)
    for group, found in zip(waiting, _run_groups(recipe, waiting, workers, backend), strict=True):
        write_text_whole(_group_path(resume, group), json.dumps(found, allow_nan=False))
        rows += found
        done, ran = done + len(found), ran + len(found)
        if progress is not None:
            progress(done, total, (time.monotonic() - begin) / ran * (total - done))
    if progress is not None and not ran:
        progress(done, total, None)
    return sorted(rows, key=lambda row: row["index"])


def _run_groups(recipe: Recipe, groups: list[Group], workers: int, backend: str) -> Iterable[list[dict[str, Any]]]:
    """Rows of every group in order."""
    if backend == "joblib" and (workers == 1 or len(groups) < 2):
        source = open_source(base_workload(recipe)) if groups else None
        return (run_group(recipe, group, source) for group in groups)
    here = None if recipe.base.trace is None else Path.cwd()
    return run_jobs(functools.partial(_run_elsewhere, recipe, here), groups, backend=backend, workers=workers)


def _run_elsewhere(recipe: Recipe, here: Path | None, group: Group) -> list[dict[str, Any]]:
    """Rows of one group in a process of its own, from the directory to which the trace's path is relative."""
    with contextlib.nullcontext() if here is None else contextlib.chdir(here):
        return run_group(recipe, group)


def run_group(recipe: Recipe, group: Group, source: Source | None = None) -> list[dict[str, Any]]:
    """Rows of one group of configurations, which share a selection."""
    source, schedule = source or open_source(base_workload(recipe)), recipe.resolved_schedule()
    rows: list[dict[str, Any]] = []
    batch: list[tuple[Configuration, Workload]] = []
    waiting = 0
    last: tuple[Any, Workload] | None = None
    for configuration in group.configurations:
        if configuration.request is None:
            rows.append(refused_row(configuration, configuration.refused))
            continue
        drawn = dataclasses.replace(configuration.request, storage=None)  # how the host keeps blocks changes no miss
        try:
            if last is None or last[0] != drawn:
                last = None
                last = (drawn, source.workload(drawn))
            workload = last[1].stored_as(configuration.request.storage)
            schedule.check(workload)
            if not recipe.extrapolate:
                check_grid(workload, configuration.hardware)
        except NosaError as error:
            rows.append(refused_row(configuration, str(error)))
            continue
        batch.append((configuration, workload))
        waiting += len(workload.loads)
        if waiting >= _ROWS_AT_ONCE:
            rows += _priced(schedule, batch)
            batch, waiting = [], 0
    if batch:
        rows += _priced(schedule, batch)
    return rows


def _priced(schedule: Schedule, batch: list[tuple[Configuration, Workload]]) -> list[dict[str, Any]]:
    predictions = price([(w, c.hardware) for c, w in batch], schedule)
    return [
        predicted_row(configuration, prediction)
        for (configuration, _), prediction in zip(batch, predictions, strict=True)
    ]


def _group_path(resume: Path, group: Group) -> Path:
    return resume / f"group-{group.number:06d}.json"


def _read_back(path: Path, group: Group) -> list[dict[str, Any]] | None:
    """Rows of a finished group, None when it is not there or not whole."""
    if not path.is_file():
        return None
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        indices = {row["index"] for row in rows}
    except (ValueError, TypeError, KeyError):
        return None
    return rows if indices == {c.index for c in group.configurations} else None


def _fingerprint(recipe: Recipe, meta: TraceMeta | None) -> str:
    """Names what a finished group depends on: the recipe, what the files that it names hold, the program's version."""
    identity: dict[str, Any] = {"recipe": recipe.model_dump(), "version": nosa_sys.__version__}
    identity["hardware"] = [repr(profile) for profile in profiles(recipe).values()]
    identity["shapes"] = [repr(ModelShape.resolve(name)) for name in recipe.axes.model_shape or ()]
    if recipe.base.synthetic is not None:
        locality = recipe.base.synthetic.build_locality()
        identity["locality"] = locality.to_json() if isinstance(locality, FittedLocality) else repr(locality)
        identity["shapes"].append(repr(ModelShape.resolve(recipe.base.synthetic.model_shape)))
    if meta is not None:
        directory = Path(str(recipe.base.trace))
        parts = sorted(directory.glob("*/part-*.parquet"))
        identity["meta"] = meta.to_dict()
        identity["parts"] = [[str(p.relative_to(directory)), p.stat().st_size, p.stat().st_mtime_ns] for p in parts]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
