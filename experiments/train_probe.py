"""Seconds a training step, by run and attention, before a training that may take many minutes.

    python -m nosa_sys.experiments.train_probe RECIPE.yaml --out DIR [--texts PACK] [--attention sdpa,flex]

Each run of the recipe (its first seed) makes a few steps under each attention; nothing is saved of them. Without texts
the tokens are drawn, and with --random so are the weights: then selections are less alike between neighbours than a
trained model's, and sparse attention takes longer. probe.json is written after every cell; profile-RUN-ATTENTION.txt
lists the operations of one step of the run named by --profile.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray

from nosa_sys.cli.settings import read_yaml_mapping
from nosa_sys.errors import NosaError, NumericsError
from nosa_sys.experiments.decode_bench import facts
from nosa_sys.model_shape import ModelShape
from nosa_sys.models.load import LoadedModel, check_device
from nosa_sys.models.random import random_model
from nosa_sys.models.tokenizer import Tokenizer
from nosa_sys.training.loop import Trainer, open_base
from nosa_sys.training.recipe import ATTENTION_NAMES, RECIPE_KEYS, TrainSettings, parse_train_recipe
from nosa_sys.training.text_sources import TextSource, open_texts

_UNTIMED = 3  # first steps: compilation, caches, the allocator


class DrawnTokens:
    """Random sequences, for a probe without texts; a TextSource and its own Sequences."""

    names: list[dict[str, Any]] = []  # noqa: RUF012 - there is never one
    digests: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, vocabulary: int, length: int) -> None:
        self._vocabulary, self._length = vocabulary, length
        self._rng = np.random.default_rng(0)

    def sequences(self, settings: TrainSettings, tokenizer: Tokenizer, *, held_out: bool = False) -> DrawnTokens:
        return DrawnTokens(self._vocabulary, settings.length)

    def next(self) -> NDArray[np.int64]:
        return self._rng.integers(0, self._vocabulary, self._length)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


def main(arguments: list[str] | None = None) -> int:
    """Probe every cell; 0 when all ran, 1 when one failed, 2 for a wrong request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--attention", default=",".join(ATTENTION_NAMES))
    parser.add_argument("--only", help="runs, comma separated")
    parser.add_argument("--steps", type=int, default=12, help=f"a cell, {_UNTIMED} of them untimed")
    parser.add_argument("--length", type=int, help="tokens a sequence in place of the recipe's")
    parser.add_argument("--random", choices=("smollm2-135m", "tiny"), help="random weights of this shape")
    parser.add_argument("--profile", default="nosa", help="run of which one step is profiled on a GPU")
    options = parser.parse_args(arguments)
    try:
        check_device(options.device)
        runs = _runs(options)
        options.out.mkdir(parents=True, exist_ok=True)
        rows = list(_rows(options, runs))
    except NosaError as error:
        print(error, file=sys.stderr)
        return 2
    return int(any(row["error"] for row in rows))


def _runs(options: argparse.Namespace) -> list[TrainSettings]:
    found: dict[str, TrainSettings] = {}
    for run in parse_train_recipe(read_yaml_mapping(options.recipe, RECIPE_KEYS), str(options.recipe)):
        if options.only is None or run.name in options.only.split(","):
            found.setdefault(run.name, run)
    change = {} if options.length is None else {"length": options.length}
    return [dataclasses.replace(run, **change) for run in found.values()]


def _rows(options: argparse.Namespace, runs: list[TrainSettings]) -> Iterator[dict[str, Any]]:
    bases: dict[str, LoadedModel] = {}
    rows: list[dict[str, Any]] = []
    for attention in options.attention.split(","):
        for run in runs:
            settings = dataclasses.replace(run, attention=attention, held_out_sequences=0)
            if run.head not in bases:
                bases[run.head] = _base(options, settings)
            row = _probe(settings, bases[run.head], options)
            rows.append(row)
            document: dict[str, Any] = {"kind": "training probe", "status": "measured", "rows": rows}
            document |= {"facts": facts(bases[run.head].model), "weights": "random" if options.random else run.model}
            (options.out / "probe.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            print(json.dumps(row), flush=True)
            yield row


def _base(options: argparse.Namespace, settings: TrainSettings) -> LoadedModel:
    if options.random is None:
        return open_base(settings, options.device)
    shape = ModelShape("tiny", 2, 6, 2, 16, 32, 48, 128, dtype="float32", tied_embedding=True)
    if options.random != "tiny":
        shape = ModelShape.preset(options.random)
    model = random_model(shape, 0, "float32", head=settings.head, device=options.device)
    return LoadedModel(model, "random weights", [], Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE())))


def _probe(settings: TrainSettings, base: LoadedModel, options: argparse.Namespace) -> dict[str, Any]:
    on_gpu = base.model.device.type == "cuda"
    row: dict[str, Any] = {"run": settings.name, "attention": settings.attention, "trained": settings.trained}
    row |= {"method": settings.method, "length": settings.length, "topk": settings.sparse.topk, "error": ""}
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(base.model.device)
    try:
        texts: TextSource = DrawnTokens(base.shape.vocab_size, settings.length)
        if options.texts is not None:
            texts = open_texts(options.texts, settings.held_out)
        with tempfile.TemporaryDirectory() as directory:
            trainer = Trainer(settings, texts, Path(directory), loaded=base)
            times_s, losses = [], []
            for _ in range(options.steps):
                start_s = time.perf_counter()
                losses.append(trainer.train_step()["loss"])
                times_s.append(time.perf_counter() - start_s)
            timed = times_s[_UNTIMED:] or times_s
            row |= {"steps": len(timed), "step_s": statistics.median(timed), "fastest_step_s": min(timed)}
            row |= {"first_step_s": times_s[0], "tokens_per_s": settings.batch * settings.length / row["step_s"]}
            row |= {"losses": losses}
            row["peak_gpu_bytes"] = torch.cuda.max_memory_allocated(base.model.device) if on_gpu else None
            if on_gpu and settings.name == options.profile:
                _profile(trainer, options.out / f"profile-{settings.name}-{settings.attention}.txt")
    except (NumericsError, RuntimeError) as error:  # one form may not run where another does
        row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    return row


def _profile(trainer: Trainer, path: Path) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        trainer.train_step()
    path.write_text(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=45), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
