"""Where a training run's sequences come from: texts that are encoded as they are read, or a file of token ids.

A token pack holds the very sequences that the runs of a recipe draw, encoded once: a GPU then waits for no tokenizer,
and needs neither the texts nor their archive.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from nosa_sys.errors import ConfigError
from nosa_sys.models.tokenizer import Tokenizer
from nosa_sys.training.data import PackedSequences
from nosa_sys.training.recipe import TrainSettings
from nosa_sys.training.texts import Document, read_texts, split_held_out

PACK_SUFFIX = ".safetensors"
_RECORD, _VERSION = "nosa_sys", 1


class Sequences(Protocol):
    """A seeded order of token sequences that can be resumed."""

    def next(self) -> NDArray[np.int64]:
        """The next sequence, int64 [length]."""

    def state(self) -> dict[str, Any]:
        """Where the reading stands, in JSON values."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a ``state`` of the same texts and settings."""


class TextSource(Protocol):
    """``names``: name, sha256, characters and held_out of each text; ``digests``: sha256 and held_out_sha256 over the
    names and digests of either side."""

    @property
    def names(self) -> list[dict[str, Any]]: ...
    @property
    def digests(self) -> dict[str, str]: ...

    def sequences(self, settings: TrainSettings, tokenizer: Tokenizer, *, held_out: bool = False) -> Sequences:
        """Training sequences of a run, or the held-out ones, which are the same under every seed."""


class DocumentTexts:
    """Texts, of which the share ``held_out`` is kept from training; encoded when a reader comes to them."""

    def __init__(self, documents: Sequence[Document], held_out: float) -> None:
        self._training, self._held_out = split_held_out(documents, held_out)
        self.names = [
            {"name": document.name, "sha256": document.sha256, "characters": len(document.text), "held_out": side}
            for side, part in ((False, self._training), (True, self._held_out))
            for document in part
        ]
        self.digests = {"sha256": _digest(self._training), "held_out_sha256": _digest(self._held_out)}

    def sequences(self, settings: TrainSettings, tokenizer: Tokenizer, *, held_out: bool = False) -> PackedSequences:
        documents = self._held_out if held_out else self._training
        return PackedSequences(
            documents,
            tokenizer,
            length=settings.length,
            eos=end_of_text(tokenizer),
            streams=min(settings.streams, len(documents)),
            seed=0 if held_out else settings.seed,
        )


def end_of_text(tokenizer: Tokenizer) -> int:
    """The id that ends a document; ConfigError for a tokenizer that names none."""
    if not tokenizer.eos_ids:
        raise ConfigError("the model's tokenizer names no EOS token; documents cannot be told apart")
    return tokenizer.eos_ids[0]


def _digest(documents: Sequence[Document]) -> str:
    """SHA-256 over the names and digests of texts."""
    lines = "".join(f"{document.sha256} {document.name}\n" for document in documents)
    return hashlib.sha256(lines.encode()).hexdigest()


# ---- token packs
@dataclass(frozen=True)
class _Stored:
    """Sequences of one tensor of a pack, in their order."""

    ids: NDArray[Any]
    place: list[int]  # how many were drawn

    def next(self) -> NDArray[np.int64]:
        (drawn,) = self.place
        if drawn >= len(self.ids):
            raise ConfigError(
                f"the token pack ends after {len(self.ids)} sequences; pack the recipe with as many steps"
            )
        self.place[0] = drawn + 1
        return self.ids[drawn].astype(np.int64)

    def state(self) -> dict[str, Any]:
        return {"n_drawn": self.place[0]}

    def restore(self, state: dict[str, Any]) -> None:
        self.place[0] = int(state["n_drawn"])


class TokenPack:
    """A file of ``write_pack``, every tensor of it checked against its SHA-256.

    Raises ConfigError for a file that is no whole token pack."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with safe_open(path, framework="np") as file:
                self._record = json.loads((file.metadata() or {})[_RECORD])
                self._tensors = {name: file.get_tensor(name) for name in self._record["tensors"]}
            self.names: list[dict[str, Any]] = self._record["names"]
            self.digests: dict[str, str] = self._record["digests"]
            if self._record["version"] != _VERSION:
                raise ValueError(f"version {self._record['version']!r}, this program reads {_VERSION}; pack again")
            self._made_with = {name: self._record[name] for name in ("held_out", "tokenizer")}
            torn = [name for name, ids in self._tensors.items() if _sha256(ids) != self._record["tensors"][name]]
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is no token pack of nosa train --pack: {error}") from None
        if torn:
            raise ConfigError(f"{path}: the ids of {torn[0]} are not those that were written; pack the texts again")

    def sequences(self, settings: TrainSettings, tokenizer: Tokenizer, *, held_out: bool = False) -> _Stored:
        """Raises ConfigError when the pack was made for other settings or another tokenizer."""
        for name, mine in (("held_out", settings.held_out), ("tokenizer", tokenizer.sha256)):
            if self._made_with[name] != mine:
                raise ConfigError(f"{self._path} was made with {name} {self._made_with[name]}, not {mine}; pack again")
        name = _tensor_name(settings, held_out)
        if name not in self._tensors:
            raise ConfigError(f"{self._path} holds no sequences {name}; it has {', '.join(self._tensors)}")
        return _Stored(self._tensors[name], [0])

    def check(self, settings: TrainSettings, vocab_size: int) -> None:
        """Raises ConfigError unless what a run reads, training and held out, is [sequence, ``length``] of ids below
        ``vocab_size``."""
        for name in (_tensor_name(settings, held_out) for held_out in (False, True)):
            if (ids := self._tensors.get(name)) is None:
                continue
            if ids.ndim != 2 or ids.shape[1] != settings.length or ids.dtype.kind not in "iu":
                raise ConfigError(
                    f"{self._path}: {name} holds {ids.dtype} {list(ids.shape)}, not sequences of "
                    f"length={settings.length} token ids; pack again"
                )
            wrong = ids[(ids < 0) | (ids >= vocab_size)]
            if wrong.size:
                raise ConfigError(
                    f"{self._path}: {name} holds the id {wrong[0]}, and the model's vocabulary ends at "
                    f"{vocab_size - 1}; pack again with this model"
                )


def open_texts(path: Path, held_out: float) -> TextSource:
    """A token pack, or a folder or archive of texts; ConfigError for what is neither."""
    if path.suffix == PACK_SUFFIX:
        return TokenPack(path)
    return DocumentTexts(read_texts(path), held_out)


def write_pack(path: Path, runs: Iterable[TrainSettings], texts: DocumentTexts, tokenizer: Tokenizer) -> dict[str, int]:
    """Draw what ``runs`` need from ``texts`` and write it to ``path``; returns the number of sequences by tensor.

    Runs that read the same sequences share them. Raises ConfigError for runs that keep different shares from training.
    """
    needed: dict[str, tuple[TrainSettings, bool, int]] = {}
    shares = set()
    for run in runs:
        shares.add(run.held_out)
        counts = {False: run.steps * run.batch, True: run.held_out_sequences}
        for held_out, n in counts.items():
            name = _tensor_name(run, held_out)
            if n and (not held_out or any(entry["held_out"] for entry in texts.names)):
                needed[name] = (run, held_out, max(n, needed[name][2] if name in needed else 0))
    if len(shares) != 1:
        raise ConfigError(f"one token pack serves one held_out, not {sorted(shares)}; pack the runs apart")
    kind = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    tensors = {}
    for name, (run, held_out, n) in needed.items():
        drawn = texts.sequences(run, tokenizer, held_out=held_out)
        tensors[name] = np.stack([drawn.next() for _ in range(n)]).astype(kind)
    record = {
        "version": _VERSION,
        "held_out": shares.pop(),
        "tokenizer": tokenizer.sha256,
        "names": texts.names,
        "digests": texts.digests,
        "tensors": {name: _sha256(ids) for name, ids in tensors.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={_RECORD: json.dumps(record)})
    return {name: len(ids) for name, ids in tensors.items()}


def _tensor_name(settings: TrainSettings, held_out: bool) -> str:
    """What a run's sequences depend on, besides the texts and the tokenizer."""
    part = "held_out" if held_out else f"seed{settings.seed}"
    return f"length{settings.length}.streams{settings.streams}.{part}"


def _sha256(ids: NDArray[Any]) -> str:
    return hashlib.sha256(ids.tobytes()).hexdigest()
