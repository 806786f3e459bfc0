"""Texts from folders and archives, the held-out split, and packing: order, borders, resumption."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from nosa_sys.errors import ConfigError
from nosa_sys.training import texts
from nosa_sys.training.data import PackedSequences
from nosa_sys.training.texts import Document, read_texts, split_held_out
from tests.training.small import ByteTokenizer

EOS = 63


def write_archive(path: Path, members: dict[str, bytes], mode: str = "w:xz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return path


def test_folders_and_archives_give_the_same_texts(tmp_path: Path) -> None:
    members = {"b.md": b"second", "sub/a.txt": "erst\u00e9".encode(), "c.bin": b"\xff", "empty.txt": b" \n"}
    folder = tmp_path / "folder"
    for name, data in members.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    expected = [Document("b.md", "second"), Document("sub/a.txt", "erst\u00e9")]
    assert read_texts(folder) == expected
    for mode in ("w:xz", "w:gz", "w"):
        assert read_texts(write_archive(tmp_path / f"texts.{mode[2:]}", members, mode)) == expected


def test_archives_write_nothing_and_leave_their_folder_never(tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "evil.tar.xz", {"../../escape.txt": b"text"})
    before = sorted(tmp_path.parent.rglob("escape*"))
    assert [document.name for document in read_texts(archive)] == ["../../escape.txt"]
    assert sorted(tmp_path.parent.rglob("escape*")) == before


def test_bad_texts_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        read_texts(tmp_path / "none")
    with pytest.raises(ConfigError, match="holds no text"):
        read_texts(tmp_path)
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bad\.txt is not UTF-8"):
        read_texts(tmp_path)
    torn = write_archive(tmp_path / "torn.tar.xz", {"a.txt": bytes(range(97, 123)) * 4000})
    torn.write_bytes(torn.read_bytes()[:150])
    with pytest.raises(ConfigError, match="no readable tar archive"):
        read_texts(torn)
    (tmp_path / "noise").write_bytes(b"no archive at all")
    with pytest.raises(ConfigError, match="no readable tar archive"):
        read_texts(tmp_path / "noise")
    monkeypatch.setattr(texts, "MAX_DOCUMENT_BYTES", 3)
    with pytest.raises(ConfigError, match="more than the limit of 3"):
        read_texts(write_archive(tmp_path / "big.tar", {"big.txt": b"four"}, "w"))


def test_split_is_by_document_stable_and_disjoint() -> None:
    documents = [Document(f"{i}.txt", "x") for i in range(200)]
    training, held_out = split_held_out(documents, 0.2, seed=1)
    assert sorted(training + held_out, key=documents.index) == documents
    assert 20 < len(held_out) < 60
    assert split_held_out([*documents, Document("new", "x")], 0.2, seed=1)[1][: len(held_out)] == held_out
    assert split_held_out(documents, 0.2, seed=2)[1] != held_out
    assert split_held_out(documents, 0.0)[1] == []
    with pytest.raises(ConfigError, match="leaves none held out"):
        split_held_out(documents[:1], 0.01)
    with pytest.raises(ConfigError, match=r"must lie in \[0, 1\)"):
        split_held_out(documents, 1.0)


def documents(n: int) -> list[Document]:
    """Document i is made of 20 + 7 i times the token i."""
    return [Document(str(i), chr(i) * (20 + 7 * i)) for i in range(n)]


def test_one_stream_is_the_documents_end_to_end() -> None:
    packed = PackedSequences(documents(5), ByteTokenizer(), length=10, eos=EOS, streams=1, seed=3)
    total = sum(20 + 7 * i + 1 for i in range(5))
    first_pass = np.concatenate([packed.next() for _ in range(-(-total // 10))])[:total]
    pieces = np.split(first_pass, np.flatnonzero(first_pass == EOS)[:-1] + 1)
    assert sorted(int(piece[0]) for piece in pieces) == list(range(5))
    for piece in pieces:
        assert piece.tolist() == [piece[0]] * (20 + 7 * piece[0]) + [EOS]
    assert [piece[0] for piece in pieces] != list(range(5)), "the order is drawn"


def test_neighbours_come_from_different_documents_and_all_are_read() -> None:
    packed = PackedSequences(documents(8), ByteTokenizer(), length=16, eos=EOS, streams=4)
    rows = [packed.next() for _ in range(60)]
    for i in range(0, 60, 4):
        owners = [set(row.tolist()) - {EOS} for row in rows[i : i + 4]]
        assert all(not (a & b) for n, a in enumerate(owners) for b in owners[:n])
    assert set(np.concatenate(rows).tolist()) == {*range(8), EOS}


@pytest.mark.parametrize("n_before", [0, 1, 7, 41])
def test_a_restored_reader_goes_on_exactly(n_before: int) -> None:
    def make(seed: int = 5) -> PackedSequences:
        return PackedSequences(documents(6), ByteTokenizer(), length=23, eos=EOS, streams=3, seed=seed)

    whole, other = make(), make()
    for _ in range(n_before):
        whole.next()
    other.restore(whole.state())
    assert all(np.array_equal(whole.next(), other.next()) for _ in range(50))
    assert not all(np.array_equal(make().next(), make(6).next()) for _ in range(1))


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="length=1"):
        PackedSequences(documents(2), ByteTokenizer(), length=1, eos=EOS)
    with pytest.raises(ConfigError, match=r"streams=3 must lie in \[1, 2\]"):
        PackedSequences(documents(2), ByteTokenizer(), length=8, eos=EOS, streams=3)
    packed = PackedSequences(documents(4), ByteTokenizer(), length=8, eos=EOS, streams=2)
    with pytest.raises(ConfigError, match="has 1 streams"):
        packed.restore({"n_drawn": 0, "readers": [[0, 0, 0]]})
