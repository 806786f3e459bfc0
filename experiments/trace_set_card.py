"""The data card of a trace set: README.md and summary.json, every figure out of the captures and their replays."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from nosa_sys.cli.console import number
from nosa_sys.errors import CapacityError, ConfigError
from nosa_sys.experiments.trace_set_parts import HOT_BUFFER, Part, anew, trace_files
from nosa_sys.outputs import check_output
from nosa_sys.traces.schema import TraceMeta, write_text_whole

CARD_FILE, README, SUMS = "summary.json", "README.md", "SHA256SUMS"
Row = dict[str, Any]

_USE = """## Intended use

Block selections of a small trained model on real text: to check the locality guarantee (`nosa trace check DIR`), to
replay other slot counts and eviction policies (`nosa replay DIR`), to price decoding on other hardware (`nosa simulate
DIR`), and, from the traces with scores, to select again under other budgets and to fit and check locality models (`nosa
locality fit`, `nosa locality check`). Format: docs/trace-format.md.

## Limits

- One small model; {n_documents} documents, in English and Python; {steps} steps at the end of each context.
- The tokens decoded are the document's own (teacher forcing), so that all methods see the same text. What a model would
  write itself may move its selections differently.
- Each method has its own weights, trained under it: rows of two methods differ by weights as well as by selection.
- Times in table `steps` are those of the whole batch on the device named above, with recording on: no benchmark.
- Traces without scores cannot be selected again under another budget.
- Scores are rounded to the bits named above; a row whose rounded scores would select other blocks keeps more. Under
  budgets other than the captured ones, rounding may make ties that the captured scores did not have.
"""


def check_shipped(directory: Path) -> None:
    """ConfigError unless ``directory`` is free, or holds a trace set that may be replaced."""
    named, free = directory.name not in ("", ".."), not directory.exists()
    if not named or not (free or (directory / SUMS).is_file() or (directory.is_dir() and not any(directory.iterdir()))):
        raise ConfigError(
            f"{directory} is no free place, nor a shipped trace set to replace; give --shipped another one"
        )
    check_output(directory, overwrite=True)


def ship(parts: list[tuple[Part, Path, Row]], facts: Row, directory: Path, budget_bytes: int) -> Row:
    """Put the parts and their card into ``directory``, replaced whole; returns the card's document.

    ``facts`` of the run: name, command, documents, captures_planned, and what `summary.json` shall say besides.
    CapacityError where all files together exceed ``budget_bytes``.
    """
    check_shipped(directory)
    document: Row = {"kind": "trace_set", "status": "measured", **facts, "hot_buffer": HOT_BUFFER}
    document["traces"] = [_trace_entry(part, folder, figures) for part, folder, figures in parts]
    document["rows"] = [{"trace": part.name, **row} for part, _, figures in parts for row in figures.get("rows", ())]
    document["shipped_trace_bytes"] = sum(entry["n_bytes"] for entry in document["traces"])
    with anew(directory) as partial:
        for part, folder, _ in parts:
            for path in trace_files(folder):
                target = partial / part.name / path.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        write_text_whole(partial / CARD_FILE, json.dumps(document, indent=1, allow_nan=False) + "\n")
        write_text_whole(partial / README, readme(document))
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        sums = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(partial).as_posix()}\n" for p in files]
        write_text_whole(partial / SUMS, "".join(sums))
        n_bytes = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
        if n_bytes > budget_bytes:
            largest = sorted(document["traces"], key=lambda entry: -entry["n_bytes"])[:3]
            raise CapacityError(
                f"the part to ship has {n_bytes} bytes, over budget_bytes={budget_bytes}; largest: "
                + ", ".join(f"{entry['name']} {entry['n_bytes']}" for entry in largest)
                + "; give shipped_scores fewer bits or documents, or raise budget_bytes"
            )
    return document | {"n_bytes": n_bytes}


def _trace_entry(part: Part, folder: Path, figures: Row) -> Row:
    about, meta = figures["made_of"]["capture"], TraceMeta.load(folder)
    names = [document["name"] for document in about["documents"]]
    kept = range(len(names)) if part.sequences is None else part.sequences
    entry: Row = {
        "name": part.name,
        "documents": {str(index): names[index] for index in kept},
        "method": meta.method,
        "head": meta.head,
        "sparse": meta.sparse.to_dict(),
        "slots": meta.slots,
        "policy": meta.policy,
        "tables": figures["tables"],
        "score_bits": part.score_bits,
        "check": figures["check"],
        "n_bytes": figures["n_bytes"],
        "sha256": figures["sha256"],
    }
    for name in ("capture_check", "capture_bytes", "capture_sha256"):
        entry[name] = figures.get(name)
    for name in ("context", "model", "adapter", "adapter_sha256", "rope_theta", "dtype", "seed", "steps"):
        entry[name] = about[name]
    entry["device"], entry["driver"], entry["versions"] = meta.device, meta.driver, meta.versions
    entry["git_revision"], entry["capture_s"] = meta.git_revision, about["capture_s"]
    return entry


def readme(document: Row) -> str:
    """The card for people, in Markdown."""
    traces = document["traces"]
    devices = sorted({entry["device"] for entry in traces})
    revisions = sorted({entry["git_revision"] for entry in traces})
    versions = ", ".join(f"{name} {version}" for name, version in sorted(traces[0]["versions"].items()))
    lines = [
        f"# Trace set {document['name']}",
        "",
        f"Made by `{document['command']}`; {document['captures_finished']} of {document['captures_planned']} captures. "
        f"Figures are measured on {', '.join(devices)} (revision {', '.join(revisions) or 'unknown'}; {versions}); "
        f"misses are replays of the recorded selections. Model {', '.join(sorted({e['model'] for e in traces}))}, seed "
        f"{traces[0]['seed']}. `{CARD_FILE}` holds all of them, `{SUMS}` the digest of every "
        "file (`sha256sum -c`).",
        "",
        "## Documents",
        "",
        *_table(
            ("document", "kind", "characters read", "tokens", "from", "version", "licence", "sha256"),
            [
                (d["name"], d["kind"], d["characters"], d["tokens"], d["source"], d["version"], d["licence"], _code(d))
                for d in document["documents"]
            ],
        ),
        "",
        "A context of n tokens is the document's first n: all but the last steps are prefilled, the rest is decoded "
        "token by token as the document has it. A batch of one method and context is one trace, a sequence a document.",
        "",
        "## Traces",
        "",
        *_table(
            ("trace", "documents (sequences)", "tables", "score bits", "bytes", "captured, bytes", "sha256"),
            [
                (
                    entry["name"],
                    ", ".join(f"{name} ({index})" for index, name in entry["documents"].items()),
                    ", ".join(entry["tables"]),
                    entry["score_bits"],
                    entry["n_bytes"],
                    entry["capture_bytes"],
                    _code(entry),
                )
                for entry in traces
            ],
        ),
        "",
        "| trace | method, head | k of blocks | adapter (sha256) | rope theta | dtype | capture, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in traces:
        sparse = entry["sparse"]
        digest = entry["adapter_sha256"]
        adapter = "as shipped"
        if entry["adapter"] is not None:
            path = Path(entry["adapter"])  # training leaves RUN/adapter.safetensors
            adapter = f"`{path.parent.name if path.stem == 'adapter' else path.stem}` (`{digest[:12]}`)"
        budget = f"{sparse['topk']} of {-(-entry['context'] // sparse['block_size'])}"
        theta = number(entry["rope_theta"]) if entry["rope_theta"] else "the model's"
        lines.append(
            f"| {entry['name']} | {entry['method']}, {entry['head']} | {budget} | {adapter} | {theta} "
            f"| {entry['dtype']} | {number(entry['capture_s'])} |"
        )
    hot = f"{document['hot_buffer']:g} k LRU"
    lines += [
        "",
        "## Figures",
        "",
        "Warm rows alone (one row: step, layer, KV head); gamma is the share of a step's blocks that the step before "
        "had too. H2D bytes are of one sequence.",
        "",
        *_table(
            (
                *("document", "kind", "context", "method", "steps", "gamma, macro", "weighted", "misses, slots k"),
                *(hot, "H2D bytes a step, slots k", hot),
            ),
            [
                tuple(
                    row[key]
                    for key in (
                        *(
                            "document",
                            "kind",
                            "context",
                            "method",
                            "steps",
                            "gamma_macro",
                            "gamma_weighted",
                            "misses_k",
                        ),
                        *("misses_hot", "h2d_bytes_per_step_k", "h2d_bytes_per_step_hot"),
                    )
                )
                for row in document["rows"]
            ],
        ),
        "",
        _USE.format(n_documents=len(document["documents"]), steps=document["steps"]),
    ]
    return "\n".join(lines)


def _code(entry: Row) -> str:
    return f"`{entry['sha256'][:16]}`"


def _table(header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[str]:
    cells = [[cell if isinstance(cell, str) else number(cell) for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (list(header), ["---"] * len(header), *cells)]
