"""Texts to train and evaluate on: a folder or a tar archive of .txt and .md files, split by document."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nosa_sys.errors import ConfigError
from nosa_sys.models.tokenizer import Tokenizer

SUFFIXES = (".txt", ".md")
MAX_DOCUMENT_BYTES = 64 * 2**20
MAX_TOTAL_BYTES = 4 * 2**30
MAX_DOCUMENTS = 100_000
_EXCERPT_CHARACTERS = 16  # of a long text are encoded for a token that is needed: four times what English takes


@dataclass(frozen=True)
class Document:
    """One text; ``name`` is its path inside the folder or archive."""

    name: str
    text: str

    @property
    def sha256(self) -> str:
        """Of the text in UTF-8."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def read_texts(path: Path) -> list[Document]:
    """All .txt and .md files of a folder (searched to the bottom) or of a tar archive, ordered by name.

    An archive is untrusted: its members are read in memory, plain files alone, never written to disk; nothing but
    whole sizes below the limits is read. Raises ConfigError for a missing path, broken archives, texts that are not
    UTF-8, too large, or none at all.
    """
    if path.is_dir():
        found = _of_folder(path)
    elif path.is_file():
        found = _of_archive(path)
    else:
        raise ConfigError(f"no such folder or archive of texts: {path}")
    documents: list[Document] = []
    total = 0
    for name, data in found:
        total += len(data)
        if total > MAX_TOTAL_BYTES or len(documents) == MAX_DOCUMENTS:
            raise ConfigError(
                f"{path} holds more than {MAX_TOTAL_BYTES} bytes or {MAX_DOCUMENTS} texts; give a part of it"
            )
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: {name} is not UTF-8 text: {error.reason} at byte {error.start}") from None
        if text.strip():
            documents.append(Document(name, text))
    if not documents:
        raise ConfigError(f"{path} holds no text; it needs files that end in {' or '.join(SUFFIXES)}")
    return sorted(documents, key=lambda document: document.name)


def _check_size(source: Path, name: str, n_bytes: int) -> None:
    if n_bytes > MAX_DOCUMENT_BYTES:
        raise ConfigError(f"{source}: {name} has {n_bytes} bytes, more than the limit of {MAX_DOCUMENT_BYTES} a text")


def _of_folder(folder: Path) -> Iterator[tuple[str, bytes]]:
    for file in sorted(folder.rglob("*")):
        if file.suffix in SUFFIXES and file.is_file():
            name = file.relative_to(folder).as_posix()
            _check_size(folder, name, file.stat().st_size)
            yield name, file.read_bytes()


def _of_archive(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(path, mode="r:*") as archive:
            for member in archive:
                if not member.isfile() or not member.name.endswith(SUFFIXES):
                    continue
                _check_size(path, member.name, member.size)
                file = archive.extractfile(member)
                if file is not None:
                    yield member.name, file.read(member.size)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ConfigError(f"{path} is no readable tar archive: {error}") from None
    except Exception as error:  # the decompressors raise errors of their own
        if type(error).__module__ not in ("lzma", "_lzma", "zlib"):
            raise
        raise ConfigError(f"{path} is no readable tar archive: {error}") from None


def split_held_out(documents: Sequence[Document], share: float, seed: int = 0) -> tuple[list[Document], list[Document]]:
    """(training, held out): whole documents, by a seeded hash of their names, so that adding texts moves no other.

    A document is held out with chance ``share`` in [0, 1). ConfigError where that leaves a side without any.
    """
    if not 0 <= share < 1:
        raise ConfigError(f"held_out={share} must lie in [0, 1)")

    def rank(document: Document) -> float:
        digest = hashlib.sha256(f"{seed}:{document.name}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64

    held_out = [document for document in documents if rank(document) < share]
    training = [document for document in documents if rank(document) >= share]
    if not training or (share > 0 and not held_out):
        side = "training" if not training else "held out"
        raise ConfigError(f"held_out={share} of {len(documents)} texts leaves none {side}; use another share or seed")
    return training, held_out


def excerpts(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    *,
    length: int,
    count: int,
    seed: int,
    on_found: Callable[[int], None] | None = None,
) -> list[tuple[Document, list[int]]]:
    """``length`` tokens from a seeded place of each of the first ``count`` documents that have so many.

    ``on_found`` hears how many there are so far. Raises ConfigError when too few are long enough.
    """
    found: list[tuple[Document, list[int]]] = []
    for index, document in enumerate(documents):
        if len(found) == count:
            break
        rng = np.random.default_rng((seed, index + 1))
        text, span = document.text, _EXCERPT_CHARACTERS * length
        if len(text) > span:  # a whole book takes a second to encode
            first = int(rng.integers(len(text) - span + 1))
            text = text[first : first + span]
        tokens = tokenizer.encode(text)
        if len(tokens) >= length:
            start = int(rng.integers(len(tokens) - length + 1))
            found.append((document, tokens[start : start + length]))
            if on_found is not None:
                on_found(len(found))
    if len(found) < count:
        raise ConfigError(
            f"{len(found)} of {len(documents)} texts have the {length} tokens that are needed, and {count} are asked "
            "for; give longer texts, or ask for fewer documents or shorter contexts"
        )
    return found
