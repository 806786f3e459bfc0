"""Train the runs of a recipe and evaluate them within so many minutes, on a machine that may not be there next time.

    python -m nosa_sys.experiments.train_and_eval --train TRAIN.yaml --texts PACK --eval EVAL.yaml --eval-texts TEXTS
        --minutes 9 --results DIR [--bring nosa-seed0] [--device cuda]

Runs are trained in order into out/TRAIN, then the subjects whose models are there are evaluated one by one into
out/EVAL; --train or --eval may be left out. The same command goes on where the last one stopped, as long as those
folders are there; other recipes or texts than theirs are refused. Every call leaves in --results: results.tar.xz with
all loss logs, summaries and rows so far, the adapters of the runs named by --bring, and session.json with what was done
and the seconds it took. An earlier results.tar.xz is read back with --earlier: its evaluated subjects are not evaluated
again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import shutil
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nosa_sys.cli.settings import read_yaml_mapping
from nosa_sys.errors import ConfigError, NosaError
from nosa_sys.experiments.train_and_eval_stages import evaluate, train
from nosa_sys.models.load import check_device
from nosa_sys.training.evaluation_settings import EVAL_KEYS
from nosa_sys.training.export import ADAPTER
from nosa_sys.training.recipe import RECIPE_KEYS, TrainSettings, parse_train_recipe

SMALL = (".json", ".jsonl", ".parquet")
ARCHIVE = "results.tar.xz"
_MAX_BYTES = 15 * 2**20  # of one file that comes back
_MAX_UNPACKED_BYTES = 256 * 2**20


def main(arguments: list[str] | None = None) -> int:
    """One session; 0 when everything is finished, 3 when something is left to do, 2 for a wrong request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--train", type=Path, help="training recipe")
    parser.add_argument("--texts", type=Path, help="token pack, folder or archive to train on")
    parser.add_argument("--eval", type=Path, action="append", default=[], help="evaluation recipe; may be given again")
    parser.add_argument("--eval-texts", type=Path, help="folder or archive to evaluate on")
    parser.add_argument("--results", type=Path, required=True, help="folder for what comes back")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", help="runs to train, comma separated")
    parser.add_argument("--seed", type=int, help="only runs of this seed")
    parser.add_argument("--attention", help="for every run")
    parser.add_argument("--steps", type=int, help="for every run")
    parser.add_argument("--bring", default="", help="runs whose adapters come back, comma separated")
    parser.add_argument("--earlier", type=Path, help="results.tar.xz of a session before, on another machine")
    parser.add_argument("--device", default="cuda")
    for name in ("documents", "cases", "generation_documents"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="in place of the evaluation recipe's")
    options = parser.parse_args(arguments)
    end_s = time.monotonic() + 60 * options.minutes
    try:
        return _session(options, lambda: end_s - time.monotonic())
    except NosaError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2


def _session(options: argparse.Namespace, left_s: Callable[[], float]) -> int:
    if not options.minutes >= 0:
        raise ConfigError(f"--minutes {options.minutes} must be a number >= 0")
    check_device(options.device)
    runs = _chosen_runs(options)
    if options.eval and options.eval_texts is None:
        raise ConfigError("--eval needs --eval-texts: what the models read")
    recipes = {path: read_yaml_mapping(path, EVAL_KEYS) for path in options.eval}
    for recipe, name in itertools.product(recipes.values(), ("documents", "cases", "generation_documents")):
        if getattr(options, name) is not None:
            recipe[name] = getattr(options, name)
    stems = [path.stem for path in (*([options.train] if runs else []), *options.eval)]
    if len(set(stems)) < len(stems):
        raise ConfigError(f"two recipes are called {max(stems, key=stems.count)}, and share a folder; rename one")
    check_folder(options.results, "--results")
    check_folder(options.out, "--out")
    if options.earlier is not None:
        unpack(options.earlier, options.out)
    folders = []
    session: dict[str, Any] = {"kind": "training and evaluation", "device": options.device, "training": []}
    if runs:
        folders.append(options.out / options.train.stem)
        session["training"] = train(runs, options.texts, folders[0], options.device, left_s)
    session["finished"] = all(row["finished"] for row in session["training"])
    session["evaluation"] = {}
    for path, recipe in recipes.items():
        folders.append(options.out / path.stem)
        done = evaluate(recipe, path, options.eval_texts, folders[-1], options.device, left_s)
        session["evaluation"][path.stem] = done
        session["finished"] &= all(row["finished"] for row in done)
    if options.train is not None:
        bring(options.bring, options.out / options.train.stem, options.results)
    (options.results / "session.json").write_text(json.dumps(session, indent=1) + "\n", encoding="utf-8")
    n_bytes = pack(options.out, folders, options.results / ARCHIVE)
    print(f"{options.results / ARCHIVE}: {n_bytes} bytes; {'all finished' if session['finished'] else 'not finished'}")
    return 0 if session["finished"] else 3


def _chosen_runs(options: argparse.Namespace) -> list[TrainSettings]:
    """Runs of --train that --only and --seed leave, in order of their seeds; none without --train."""
    if options.train is None:
        if not options.eval:
            raise ConfigError("nothing to do: give --train with --texts, or --eval with --eval-texts")
        return []
    if options.texts is None:
        raise ConfigError("--train needs --texts: what the models learn from")
    changes = {name: getattr(options, name) for name in ("attention", "steps") if getattr(options, name) is not None}
    runs = parse_train_recipe(read_yaml_mapping(options.train, RECIPE_KEYS), str(options.train), changes)
    if options.only is not None:
        names, known = options.only.split(","), {run.name for run in runs}
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(
                f"--only: {options.train} has no such run: {unknown[0]!r}; known: {', '.join(sorted(known))}"
            )
        runs = [run for run in runs if run.name in names]
    runs = [run for run in runs if options.seed in (None, run.seed)]
    if not runs:
        raise ConfigError(f"--only {options.only}, --seed {options.seed}: {options.train} has no such run")
    return sorted(runs, key=lambda run: run.seed)  # all methods under one seed come before the next seed


def check_folder(path: Path, option: str) -> None:
    """Make a folder unless it is there; ConfigError where something else is."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be made: {error.strerror or error}") from None


def pack(root: Path, folders: list[Path], path: Path) -> int:
    """The small files of ``folders`` in one archive, names relative to ``root``; returns its bytes."""
    with tarfile.open(path, "w:xz") as archive:
        for folder in folders:
            for file in sorted(folder.rglob("*")):
                inside = file.relative_to(folder).parts
                of_model = any(part == "model" or part.startswith("checkpoint-") for part in inside)
                if file.is_file() and file.suffix in SMALL and not of_model:
                    archive.add(file, arcname=str(file.relative_to(root)))
    return path.stat().st_size


def unpack(path: Path, root: Path) -> None:
    """Put the small files of an earlier archive back where none is; ConfigError for anything else in it."""
    try:
        with tarfile.open(path) as archive:
            members = archive.getmembers()
            if sum(member.size for member in members) > _MAX_UNPACKED_BYTES:
                raise ConfigError(f"{path} holds more than {_MAX_UNPACKED_BYTES} bytes; give a {ARCHIVE} of a session")
            if not all(member.isfile() and Path(member.name).suffix in SMALL for member in members):
                raise ConfigError(f"{path} holds more than logs and rows; give a {ARCHIVE} of a session before")
            for member in members:
                if not (root / member.name).exists():
                    archive.extract(member, root, filter="data")
    except (tarfile.TarError, lzma.LZMAError, EOFError, OSError) as error:
        raise ConfigError(f"{path} is no {ARCHIVE} of a session before: {error}") from None


def bring(names: str, folder: Path, results: Path) -> None:
    """Copy the adapters of the named runs that are finished; ConfigError for one too large to come back."""
    for name in filter(None, names.split(",")):
        adapter = folder / name / ADAPTER
        if not adapter.exists():
            print(f"{name} has no adapter yet")
            continue
        if adapter.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{adapter} has {adapter.stat().st_size} bytes, more than {_MAX_BYTES}; use a lower rank")
        shutil.copyfile(adapter, results / f"{name}.{ADAPTER}")


if __name__ == "__main__":
    sys.exit(main())
