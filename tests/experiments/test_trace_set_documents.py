"""Documents of trace sets: out of wheels, Debian packages and R data files, and carried with a manifest."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest

from nosa_sys.errors import ConfigError
from nosa_sys.experiments.trace_set_documents import (
    MANIFEST,
    DocumentEntry,
    fetch_document,
    open_documents,
    r_strings,
    write_documents,
)


def entry(source: str, **more: object) -> DocumentEntry:
    return DocumentEntry(name="text", kind="manual", source=source, licence="MIT", **more)  # type: ignore[arg-type]


def r_object(*lines: str, kind: int = 16) -> bytes:
    """One object of a .rdb file: R's XDR serialisation, format 3, of a character vector."""
    data = b"X\n" + struct.pack(">III", 3, 0x040201, 0x030500) + struct.pack(">I", 5) + b"UTF-8"
    data += struct.pack(">II", kind, len(lines))
    for line in lines:
        raw = line.encode()
        data += struct.pack(">II", 0x00040009, len(raw)) + raw
    return struct.pack(">I", len(data)) + zlib.compress(data)


def test_a_vector_of_an_r_data_file_by_its_first_line() -> None:
    raw = r_object("ONE", "first") + r_object("x", kind=13) + r_object("TWO", "", "segundo año")
    assert r_strings(raw, "TWO") == "TWO\n\nsegundo año"
    assert r_strings(raw, "ONE") == "ONE\nfirst"
    with pytest.raises(ConfigError, match="begins with 'THREE'"):
        r_strings(raw, "THREE")


def test_members_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    info = "tinytext-1.2.dist-info"
    with zipfile.ZipFile(wheels / "tinytext-1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tinytext/b.py", "beta = 2\r\n")
        wheel.writestr("tinytext/a.py", "alpha = 1\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinytext\nVersion: 1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(wheels)), ("CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(f"PIP_{name}", value)
    work = tmp_path / "work"
    work.mkdir()
    wanted = entry("pypi", package="tinytext==1.2", members=("tinytext/b.py", "*/a.py"))
    document = fetch_document(wanted, work, 1000)
    assert document.text == "beta = 2\n\n\nalpha = 1\n"
    assert document.version == "tinytext 1.2"
    assert document.source == "pypi: tinytext==1.2 (tinytext/b.py, */a.py)"
    with pytest.raises(ConfigError, match=r"tinytext==1.2 has no \*\.md"):
        fetch_document(entry("pypi", package="tinytext==1.2", members=("*.md",)), work, 1000)
    with pytest.raises(ConfigError, match=r"download of tinytext==9 failed.*--texts"):
        fetch_document(entry("pypi", package="tinytext==9", members=("a",)), work, 1000)


def test_members_of_a_debian_package(tmp_path: Path) -> None:
    """The package is there already, as after a download: no registry is asked."""
    folder = tmp_path / "some-doc"
    folder.mkdir()
    (folder / "some-doc_2.0-1_all.deb").write_bytes(b"")
    with tarfile.open(folder / "data.tar", "w") as archive:
        for name, raw in (
            ("notes.txt.gz", gzip.compress(b"front matter. Chapter 1")),
            ("data.rdb", r_object("A", "b")),
        ):
            member = tarfile.TarInfo(f"./usr/share/doc/{name}")
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
    chapter = entry("debian", package="some-doc", members=("usr/share/doc/notes.txt.gz",), begin="Chapter")
    document = fetch_document(chapter, tmp_path, 1000)
    assert (document.text, document.version) == ("Chapter 1", "some-doc 2.0-1")
    vector = entry("debian", package="some-doc", members=("usr/share/doc/data.rdb",), begin="A")
    assert fetch_document(vector, tmp_path, 1000).text == "A\nb"
    with pytest.raises(ConfigError, match="no 'Volume' to begin at"):
        fetch_document(entry("debian", package="some-doc", members=("*.gz",), begin="Volume"), tmp_path, 1000)


def test_what_was_fetched_here_is_read_elsewhere(tmp_path: Path) -> None:
    entries = (entry("pydoc"),)
    fetched = open_documents(entries, (), 5000)
    assert len(fetched[0].text) == 5000
    write_documents(fetched, tmp_path / "texts")
    assert open_documents(entries, [tmp_path / "texts"], 5000) == fetched
    manifest = json.loads((tmp_path / "texts" / MANIFEST).read_text())
    assert manifest["text"]["sha256"] == fetched[0].sha256
    assert manifest["text"]["version"].startswith("Python 3")
    with tarfile.open(tmp_path / "texts.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "texts", arcname=".")
    assert open_documents(entries, [tmp_path / "texts.tar.xz"], 5000)[0].text == fetched[0].text
    (tmp_path / "texts" / "text.txt").write_text("changed")
    with pytest.raises(ConfigError, match=f"the text of text is not the one that {MANIFEST}"):
        open_documents(entries, [tmp_path / "texts"], 5000)


def test_texts_of_several_places(tmp_path: Path) -> None:
    for place, name, text in (("one", "a.txt", "of one"), ("two", "sub/text.md", "of two"), ("two", "a.txt", "other")):
        path = tmp_path / place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    member = DocumentEntry("member", "novel", "file", "MIT", members=("a.txt",))
    found = open_documents((member, entry("pydoc")), [tmp_path / "one", tmp_path / "two"], 100)
    assert [document.text for document in found] == ["of one", "of two"]
    with pytest.raises(ConfigError, match=r"one has no text text\.txt for document text"):
        open_documents((entry("pydoc"),), [tmp_path / "one"], 100)


def test_a_file_needs_its_folder() -> None:
    with pytest.raises(ConfigError, match="document text is a file; give --texts"):
        open_documents((entry("file", members=("a.txt",)),), (), 10)


@pytest.mark.parametrize("package", ["--help", "-oDir=/tmp", "../outside", "/tmp/outside", "a b", "x" * 300])
@pytest.mark.parametrize("source", ["pypi", "debian"])
def test_a_package_is_a_plain_name(source: str, package: str) -> None:
    """It becomes a folder, and an argument of pip or apt-get."""
    with pytest.raises(ConfigError, match="must be a plain name"):
        entry(source, package=package, members=("a",))
