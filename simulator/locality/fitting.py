"""From traces to a fitted locality model: every block size, with where it came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nosa_sys.errors import ConfigError, TraceError
from nosa_sys.machine import git_revision
from nosa_sys.simulator.locality.captured import captured_sequences
from nosa_sys.simulator.locality.fit import N_ROUNDS, fit_process
from nosa_sys.simulator.locality.fitted import FittedLocality
from nosa_sys.traces.reader import Trace


def fit_traces(
    directories: Sequence[Path],
    block_sizes: Sequence[int],
    *,
    name: str,
    seed: int = 0,
    provenance: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> FittedLocality:
    """Fit to every sequence of the traces, one process a block size. ``provenance`` is added to what traces say.

    TraceError for traces of different models, or without scores, or too short; ConfigError for block sizes that the
    captured windows do not make.
    """
    if not block_sizes or len(set(block_sizes)) != len(block_sizes):
        raise ConfigError(f"block_sizes={list(block_sizes)} must be distinct, and at least one")
    traces = [Trace.open(directory) for directory in directories]
    first = traces[0].meta
    for trace in traces[1:]:
        if trace.meta.model != first.model:
            raise TraceError(f"{trace.directory} is of {trace.meta.model.name}, {directories[0]} of {first.model.name}")
    processes, contexts = {}, []
    for number, size in enumerate(block_sizes):
        captures = [sequence for trace in traces for sequence in captured_sequences(trace, size)]
        contexts = [int(c.position[0]) + 1 for c in captures] + [int(c.position[-1]) + 1 for c in captures]

        def forward(done: int, total: int, before: int = number) -> None:
            if progress is not None:
                progress(before * total + done, len(block_sizes) * total)

        processes[size] = fit_process(captures, seed=seed, progress=forward)
    facts: dict[str, Any] = {
        "sequences": [
            {"prompt_tokens": s.prompt_tokens, "prompt_sha256": s.prompt_sha256, "new_tokens": s.new_tokens}
            for trace in traces
            for s in trace.meta.sequences
        ],
        "sparse": first.sparse.to_dict(),
        "method": first.method,
        "head": first.head,
        "seed": seed,
        "rounds": N_ROUNDS,
        "git_revision": git_revision(),
    }
    low, high = min(contexts), max(contexts)
    return FittedLocality(name, first.model.name, (low, high), processes, facts | (provenance or {}))
