"""Score captures that a locality model is fitted to and held against: one trace a document, forced to its own text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from nosa_sys.errors import ConfigError
from nosa_sys.experiments.capture import CaptureRequest, open_model, run_capture
from nosa_sys.models.load import LoadedModel
from nosa_sys.outputs import whole_directory
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.schema import write_text_whole

SPARSE = SparseConfig(topk=32, init_blocks=1, window_size=512, select_blocks=8)
STEPS = 320
CONTEXTS = (4110, 5677, 7210, 7745)  # tokens of the prompt, one document after another; none ends at a block's edge
SKIP_CHARACTERS = 20_000  # front matter
DOCUMENT_FILE = "document.json"
_CHARACTERS_PER_TOKEN = 8  # more than any document here needs


@dataclass(frozen=True)
class Document:
    """A text to decode: its name, the hash of the whole file, and the characters that are read."""

    name: str
    sha256: str
    text: str


def read_documents(folder: Path, count: int) -> list[Document]:
    """The first ``count`` .md and .txt files of a folder by name; ConfigError where there are fewer or one is short."""
    paths = sorted(p for p in folder.iterdir() if p.suffix in (".md", ".txt")) if folder.is_dir() else []
    if len(paths) < count:
        raise ConfigError(f"{folder} holds {len(paths)} .md and .txt files, {count} are asked for")
    found = []
    for path in paths[:count]:
        raw = path.read_bytes()
        text = raw.decode("utf-8")[SKIP_CHARACTERS:][: _CHARACTERS_PER_TOKEN * (max(CONTEXTS) + STEPS)]
        found.append(Document(path.stem, hashlib.sha256(raw).hexdigest(), text))
    return found


def capture_documents(documents: list[Document], out: Path, *, threads: int, say: Callable[[str], None]) -> list[Path]:
    """Capture each document with scores into a folder of its own under ``out``; what is there already is kept."""
    loaded: LoadedModel | None = None
    folders = []
    for index, document in enumerate(documents):
        folders.append(out / f"document-{index:02d}")
        if not folders[-1].is_dir():
            loaded = loaded or open_model(_request(document, threads))
            say(capture_document(document, CONTEXTS[index % len(CONTEXTS)], folders[-1], loaded, threads=threads))
    return folders


def capture_document(document: Document, context: int, folder: Path, loaded: LoadedModel, *, threads: int) -> str:
    """Prefill ``context`` tokens, decode STEPS more of the document itself; returns a line about it.

    ConfigError for a document that is too short.
    """
    tokens = loaded.tokenizer.encode(document.text)
    if len(tokens) < context + STEPS:
        raise ConfigError(f"{document.name} has {len(tokens)} tokens, {context + STEPS} are needed")
    forced = tuple(tokens[context : context + STEPS])
    request = replace(_request(document, threads), max_prompt_tokens=context, force_tokens=(forced,))
    with whole_directory(folder, overwrite=False) as partial:
        summary = run_capture(request, partial, lambda stage, done, total: None, loaded)
        about = {
            "name": document.name,
            "sha256": document.sha256,
            "context_tokens": context,
            "steps": STEPS,
            "source": summary["source"],
            "device": summary["device"],
        }
        write_text_whole(partial / DOCUMENT_FILE, json.dumps(about, indent=1) + "\n")
    return f"{folder}: {document.name}, {summary['misses_per_head_step']:.3f} misses a head and step"


def _request(document: Document, threads: int) -> CaptureRequest:
    return CaptureRequest(SPARSE, (document.text,), STEPS, record_scores=True, ignore_eos=True, threads=threads)
