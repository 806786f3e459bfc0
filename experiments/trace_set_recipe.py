"""Recipes of trace sets: documents, contexts with their budgets, a model for each method, and what is shipped of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nosa_sys.errors import ConfigError
from nosa_sys.experiments.trace_set_documents import DocumentEntry
from nosa_sys.methods import HEADS, get_method
from nosa_sys.model_shape import DTYPE_BYTES
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.compact import FULL_BITS
from nosa_sys.training.recipe import build, check_name, check_ranges

CHARACTERS_PER_TOKEN = 8  # more than any document here needs


@dataclass(frozen=True)
class ContextEntry:
    """``tokens`` of context at the last step, under the budgets ``sparse``; ``rope_theta`` as `load_model` takes it."""

    tokens: int
    sparse: SparseConfig
    rope_theta: float | None = None


@dataclass(frozen=True)
class MethodEntry:
    """What decodes under a method at a context. ``runner``: the engine's; by default eager for method full, which no
    other one scores, and the device's own for the rest."""

    context: int
    method: str
    head: str = "ed_dma"
    model: str | None = None
    adapter: str | None = None
    runner: str | None = None
    scores: bool = True

    def __post_init__(self) -> None:
        get_method(self.method)
        if self.head not in HEADS:
            raise ConfigError(f"head={self.head!r} must be one of {', '.join(HEADS)}")


@dataclass(frozen=True)
class ScorePart:
    """Scores that are shipped: of ``documents`` under a method at a context, with ``bits`` significant bits."""

    context: int
    method: str
    documents: tuple[str, ...]
    bits: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= FULL_BITS:
            raise ConfigError(f"bits={self.bits} must lie in [1, {FULL_BITS}]")


@dataclass(frozen=True)
class Capture:
    """One run of the engine: a method at a context over a batch of documents."""

    name: str
    entry: MethodEntry
    context: ContextEntry
    documents: tuple[str, ...]


@dataclass(frozen=True)
class TraceSetSettings:
    """One trace set. ``steps`` decode steps end at each context; ``batch`` documents run at once, in their order.

    ``dtype`` default: bfloat16 on a GPU, else float32. ``budget_bytes`` limits the files of the part that is shipped.
    """

    name: str
    contexts: tuple[ContextEntry, ...]
    methods: tuple[MethodEntry, ...]
    documents: tuple[DocumentEntry, ...]
    shipped_scores: tuple[ScorePart, ...] = ()
    model: str = "smollm2-135m"
    steps: int = 256
    batch: int = 4
    seed: int = 0
    dtype: str | None = None
    prefill_chunk: int | None = None
    budget_bytes: int = field(default=20_000_000)

    def __post_init__(self) -> None:
        check_name(self.name)
        check_ranges(self, steps=1, batch=1, seed=0, budget_bytes=1)
        if self.prefill_chunk is not None:
            check_ranges(self, prefill_chunk=1)
        if self.dtype is not None and self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype={self.dtype!r} must be one of {', '.join(DTYPE_BYTES)}")
        names = [document.name for document in self.documents]
        for what, keys in (
            ("contexts", [entry.tokens for entry in self.contexts]),
            ("methods", [(entry.context, entry.method) for entry in self.methods]),
            ("documents", names),
        ):
            if not keys or len(set(keys)) < len(keys):
                raise ConfigError(f"{what} must be one or more, each once")
        known = {entry.tokens: entry for entry in self.contexts}
        for entry in self.methods:
            if entry.context not in known:
                raise ConfigError(f"method {entry.method}: context={entry.context} must be one of {list(known)}")
            get_method(entry.method).check(known[entry.context].sparse)
        for context in self.contexts:
            if context.tokens <= self.steps:
                raise ConfigError(f"context {context.tokens} must be longer than the {self.steps} steps that end there")
        for part in self.shipped_scores:
            if (part.context, part.method) not in {(e.context, e.method) for e in self.methods if e.scores}:
                raise ConfigError(f"shipped_scores: {part.method} at {part.context} is not captured with scores")
            if not part.documents or (unknown := [name for name in part.documents if name not in names]):
                raise ConfigError(f"shipped_scores: {unknown[0] if part.documents else 'nothing'} is no document")

    @property
    def characters(self) -> int:
        """Of a document, how many are read."""
        return CHARACTERS_PER_TOKEN * max(context.tokens for context in self.contexts)

    def captures(self) -> list[Capture]:
        """Every capture, those of one model side by side."""
        contexts = {entry.tokens: entry for entry in self.contexts}
        names = [document.name for document in self.documents]
        batches = [tuple(names[first : first + self.batch]) for first in range(0, len(names), self.batch)]
        return [
            Capture(f"{entry.context}-{entry.method}-{number}", entry, contexts[entry.context], batch)
            for entry in self.methods
            for number, batch in enumerate(batches)
        ]

    def refuse_missing_adapters(self, captures: list[Capture]) -> None:
        """ConfigError naming an adapter that is not there."""
        for capture in captures:
            adapter = capture.entry.adapter
            if adapter is not None and not Path(adapter).is_file():
                raise ConfigError(
                    f"{capture.name}: no such adapter: {adapter}; train it, name another one in the recipe, or leave "
                    "the capture out with --only"
                )


TRACE_SET_KEYS = tuple(entry.name for entry in dataclasses.fields(TraceSetSettings))
_LISTS: dict[str, type] = {
    "contexts": ContextEntry,
    "methods": MethodEntry,
    "documents": DocumentEntry,
    "shipped_scores": ScorePart,
}


def parse_trace_set(data: Mapping[str, Any], source: str) -> TraceSetSettings:
    """A recipe's mapping as settings; ConfigError names the key at fault."""
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key in _LISTS:
            if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
                raise ConfigError(f"{source}: {key} must be a list of mappings")
            value = [build(_LISTS[key], item, f"{source}: {key}") for item in value]
        values[key] = value
    return build(TraceSetSettings, values, source)
