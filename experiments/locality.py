"""A locality model fitted to some documents and held against others that it did not see, from captures on.

``python -m nosa_sys.experiments.locality --texts DIR --traces DIR --out DIR`` captures what is not there yet (minutes a
document), fits, compares, and writes ``model.json``, ``comparisons.parquet`` and ``summary.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nosa_sys.cli import console as out
from nosa_sys.cli.locality import row_of
from nosa_sys.experiments.locality_captures import DOCUMENT_FILE, STEPS, capture_documents, read_documents
from nosa_sys.machine import cpu_name, git_revision
from nosa_sys.outputs import whole_directory
from nosa_sys.simulator.locality.captured import captured_sequences
from nosa_sys.simulator.locality.fitting import fit_traces
from nosa_sys.simulator.locality.heldout import Comparison, compare, standard_settings
from nosa_sys.simulator.locality_model import LocalityModel, ScoreModel
from nosa_sys.simulator.recipe import parse_recipe
from nosa_sys.simulator.sweep import sweep
from nosa_sys.traces.reader import Trace

BLOCK_SIZES = (64, 32, 128)  # the captured one first: every setting and the simple model are compared there
N_BUDGETS_KEPT = 6  # of the standard settings, what the other block sizes are compared at: the captured budgets
NAME = "smollm2-135m"
DRAWS = 2


def run(traces: list[Path], n_fit: int, directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Fit to the first ``n_fit`` traces, compare on them and on the others, time a sweep; returns the summary."""
    documents = [json.loads((path / DOCUMENT_FILE).read_text(encoding="utf-8")) for path in traces]
    provenance = {
        "documents": documents[:n_fit],
        "command": " ".join(["python -m nosa_sys.experiments.locality", *sys.argv[1:]]),
    }
    begun = time.perf_counter()
    model = fit_traces(traces[:n_fit], BLOCK_SIZES, name=NAME, provenance=provenance)
    say(f"fitted to {n_fit} documents in {time.perf_counter() - begun:.0f} s")
    text = model.to_json()
    (directory / "model.json").write_text(text, encoding="utf-8")
    rows = []
    for block_size in BLOCK_SIZES:
        models: dict[str, ScoreModel] = {"fitted": model}
        if block_size == BLOCK_SIZES[0]:
            models["simple"] = LocalityModel()
        for name, candidate in models.items():
            for part, own in (("fitted", traces[:n_fit]), ("held_out", traces[n_fit:])):
                for comparison in _compared(candidate, own, block_size):
                    rows.append({"documents": part, "model": name, **comparison.to_dict()})
                    say(_line(f"{name} model, {part}", rows[-1]))
    _write_rows(directory / "comparisons.parquet", rows)
    document = {
        "kind": "locality",
        "status": "projected",
        "captured_status": "measured",
        "device": cpu_name(),
        "git_revision": git_revision(),
        "command": provenance["command"],
        "fitted_documents": documents[:n_fit],
        "held_out_documents": documents[n_fit:],
        "steps": STEPS,
        "draws": DRAWS,
        "model_bytes": len(text),
        "sweep": _sweep_rate(directory / "model.json"),
        "rows": rows,
    }
    (directory / "summary.json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return document


def _compared(model: ScoreModel, traces: list[Path], block_size: int) -> list[Comparison]:
    opened = [Trace.open(path) for path in traces]
    captures = [sequence for trace in opened for sequence in captured_sequences(trace, block_size)]
    meta = opened[0].meta
    settings = standard_settings(meta.sparse.with_block_size(block_size))
    if block_size != BLOCK_SIZES[0]:
        settings = settings[:N_BUDGETS_KEPT]
    return compare(model, captures, settings, shape=meta.model, draws=DRAWS)


def _line(part: str, row: dict[str, Any]) -> str:
    return f"{part}: " + ", ".join(cell if isinstance(cell, str) else out.number(cell) for cell in row_of(row))


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """One flat row a comparison."""
    flat = []
    for row in rows:
        simple = {key: value for key, value in row.items() if not isinstance(value, dict | list)}
        for group in ("setting", "captured", "drawn"):
            simple |= {f"{group}_{key}": value for key, value in row[group].items()}
        flat.append(simple | {"sequence_errors": row["sequence_errors"]})
    pq.write_table(pa.Table.from_pylist(flat), path)


def _sweep_rate(model: Path) -> dict[str, Any]:
    """Configurations a minute of a sweep in which each selects anew: 32 layers, 256 steps, one worker."""
    synthetic = {"model_shape": "nosa-8b", "context": 16384, "steps": 256, "distinct_sequences": 1}
    plan = parse_recipe(
        {
            "name": "locality-rate",
            "base": {"synthetic": synthetic | {"locality": f"fitted:{model}"}},
            "hardware": "ideal",
            "h2d_gbps": 50.0,
            "axes": {"topk": [48, 64, 80, 96], "select_blocks": [8, 12, 16, 20, 24], "slots": ["1.25x"]},
        }
    )
    wall, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        sweep(plan, Path(folder) / "sweep", workers=1)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "n_configurations": plan.n_configurations,
        "workers": 1,
        **{key: synthetic[key] for key in ("model_shape", "context", "steps", "distinct_sequences")},
        "per_minute_by_wall_clock": 60.0 * plan.n_configurations / wall,
        "per_minute_by_cpu_time": 60.0 * plan.n_configurations / cpu,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--texts", type=Path, required=True, help="folder of .md and .txt documents")
    parser.add_argument("--traces", type=Path, required=True, help="where captures are kept and looked for")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--fit", type=int, default=4, help="how many of them, the first, are fitted to")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--overwrite", action="store_true")
    given = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    found = capture_documents(
        read_documents(given.texts, given.documents), given.traces, threads=given.threads, say=say
    )
    with whole_directory(given.out, overwrite=given.overwrite) as directory:
        run(found, given.fit, directory, say)


if __name__ == "__main__":
    main()
