"""Parts of a trace set: what each capture shows, document by document, and the compact trace that is shipped of it.

Loads no torch: many processes do this at once.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nosa_sys.errors import TraceError
from nosa_sys.experiments.checks import check_document
from nosa_sys.methods import get_method
from nosa_sys.outputs import partial_path, whole_directory
from nosa_sys.slot_count import slots_of
from nosa_sys.traces.compact import compact_trace
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.replay import replay
from nosa_sys.traces.schema import META_FILE, SCHEMAS, write_text_whole

ABOUT_FILE = "trace_set.json"
FIGURES_FILE = "figures.json"
HOT_BUFFER = 1.25
Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One trace to ship: of a capture, without scores (all its sequences) or with them (``sequences`` alone)."""

    name: str
    capture: Path
    sequences: tuple[int, ...] | None = None
    score_bits: int | None = None

    def made_of(self) -> Row:
        """What its files depend on."""
        about = json.loads((self.capture / ABOUT_FILE).read_text(encoding="utf-8"))
        sequences = None if self.sequences is None else list(self.sequences)
        return {"sequences": sequences, "score_bits": self.score_bits, "capture": about}


def make_part(part: Part, directory: Path) -> Row:
    """Make the part in ``directory`` unless it is there as it was made; returns its figures, kept beside its tables.

    Raises TraceError where the capture or the compact trace breaks a rule of the trace check.
    """
    made_of = part.made_of()
    kept = kept_json(directory / FIGURES_FILE)
    if kept is not None and kept.get("made_of") == made_of and kept.get("sha256") == _digest(directory)[1]:
        return kept
    trace = Trace.open(part.capture)
    figures: Row = {"name": part.name, "made_of": made_of}
    with anew(directory) as partial:
        compact_trace(trace, partial, sequences=part.sequences, score_bits=part.score_bits)
        small = Trace.open(partial)
        figures["check"] = _checked(small)
        if part.score_bits is None:
            figures["capture_check"] = _checked(trace)
            figures["capture_bytes"], figures["capture_sha256"] = _digest(part.capture)
            figures["rows"] = document_rows(small, made_of["capture"]["documents"])
        figures["tables"] = [name for name in SCHEMAS if small.has(name)]
        figures["n_bytes"], figures["sha256"] = _digest(partial)
        write_text_whole(partial / FIGURES_FILE, json.dumps(figures, indent=1, allow_nan=False) + "\n")
    return figures


def kept_json(path: Path) -> Row | None:
    """The JSON object in a file; None where there is none that can be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


@contextmanager
def anew(path: Path) -> Iterator[Path]:
    """`whole_directory` in place of what is there and of what a killed session left half made."""
    shutil.rmtree(partial_path(path), ignore_errors=True)
    with whole_directory(path, overwrite=True) as partial:
        yield partial


def _checked(trace: Trace) -> Row:
    found = check_document(trace)
    if not found["ok"]:
        first = found["problems"][0]
        raise TraceError(
            f"trace {trace.directory} breaks {found['n_problems']} rules: {first['rule']} in {first['table']}: "
            f"{first['detail']}"
        )
    return {key: found["facts"].get(key) for key in ("n_rows", "n_rows_recounted", "n_rows_reselected")}


def trace_files(directory: Path) -> list[Path]:
    """meta.json and the parts of all tables, in name order."""
    parts = [path for name in SCHEMAS for path in (directory / name).glob("part-*.parquet")]
    return sorted([directory / META_FILE, *parts])


def _digest(directory: Path) -> tuple[int, str]:
    """Bytes of a trace, and SHA-256 over the names and digests of its files."""
    n_bytes, lines = 0, []
    for path in filter(Path.is_file, trace_files(directory)):
        raw = path.read_bytes()
        n_bytes += len(raw)
        lines.append(f"{hashlib.sha256(raw).hexdigest()}  {path.relative_to(directory).as_posix()}\n")
    return n_bytes, hashlib.sha256("".join(lines).encode()).hexdigest()


def document_rows(trace: Trace, documents: list[Row]) -> list[Row]:
    """A row for each sequence: gamma over its warm rows, misses a head and step with k slots and a hot buffer (LRU).

    Misses are replays of the recorded selections. Sequence i decoded ``documents[i]``.
    """
    meta = trace.meta
    topk = meta.sparse.topk
    dense = get_method(meta.method).dense
    runs = {"k": (topk, "exact"), "hot": (slots_of(HOT_BUFFER, topk), "lru")}
    served = {name: replay(trace, slots=slots, policy=policy) for name, (slots, policy) in runs.items()}
    rows = []
    for info in meta.sequences:
        found = served["k"]
        warm = (found.misses.sequence == info.id) & ~found.misses.cold
        gamma, selected = found.gamma[warm], found.misses.n_selected[warm]
        row = {
            "document": documents[info.id]["name"],
            "kind": documents[info.id]["kind"],
            "context": info.prompt_tokens + info.new_tokens,
            "method": meta.method,
            "steps": info.new_tokens,
            "topk": None if dense else topk,
            "blocks_selected": float(selected.mean()) if len(selected) else None,
            "gamma_macro": float(gamma.mean()) if len(gamma) else None,
            "gamma_weighted": float(np.average(gamma, weights=selected)) if len(gamma) else None,
        }
        for name, result in served.items():
            misses = result.misses.n_misses[warm]
            row[f"misses_{name}"] = float(misses.mean()) if len(misses) else None
            n_bytes = float(misses.sum()) * meta.block_bytes
            row[f"h2d_bytes_per_step_{name}"] = n_bytes / (info.new_tokens - 1) if len(misses) else None
        rows.append(row)
    return rows
