"""The reader of untrusted checkpoint files: every fault is one line naming file or tensor."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from nosa_sys.errors import CheckpointError
from nosa_sys.models.safetensors_reader import CheckpointTensors, read_header

GOOD = save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, {"note": "x"})


def file_bytes(header: Any, data: bytes = b"\0" * 24) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **changes}}


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_values_survive(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(GOOD)
    tensors = CheckpointTensors.open_file(path)
    assert tensors.metadata == {"note": "x"}
    assert tensors.take("a", (2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors.take("b", (4,)).dtype == torch.bfloat16


@pytest.mark.parametrize("length", range(len(GOOD)))
def test_truncation_at_every_byte(tmp_path: Path, length: int) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(GOOD[:length])
    assert "cut.safetensors" in refusal(lambda: read_header(path))


@pytest.mark.parametrize(
    ("header", "named"),
    [
        (entry(shape=[2**40, 2**20]), "needs"),
        (entry(shape=[2, 4]), "needs 32 bytes but its offsets span 24"),
        (entry(data_offsets=[0, 2**60], shape=[2**58]), "ends at data byte"),
        (entry(data_offsets=[24, 48]), "ends at data byte 48 but the file holds 24"),
        (entry(data_offsets=[24, 0]), "needs"),
        (entry(data_offsets=[-24, 0]), "data_offsets"),
        (entry(data_offsets=None), "data_offsets"),
        (entry(data_offsets=[0.0, 24.0]), "data_offsets"),
        (entry(shape=[2, -3]), "shape"),
        (entry(shape=[True, 6]), "shape"),
        (entry(shape=[1] * 9), "shape"),
        (entry(shape="6"), "shape"),
        (entry(dtype="F33"), "dtype 'F33'"),
        (entry(dtype=["F32"]), "dtype"),
        ({"a": 5}, "tensor a"),
        ({"a\nb": entry()["a"]}, "control characters"),
        ({"__metadata__": {"x": 5}}, "__metadata__"),
        ([1], "JSON object"),
        (b"{not json", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
    ],
)
def test_a_header_that_lies(tmp_path: Path, header: Any, named: str) -> None:
    path = tmp_path / "lies.safetensors"
    path.write_bytes(file_bytes(header))
    message = refusal(lambda: read_header(path))
    assert "lies.safetensors" in message
    assert named in message


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "overlap.safetensors"
    path.write_bytes(file_bytes({**entry(), "b": entry()["a"]}))
    tensors = CheckpointTensors.open_file(path)
    assert "overlap.safetensors" in refusal(lambda: tensors.take("a", (2, 3)))


@given(position=st.integers(0, len(GOOD) - 1), value=st.integers(0, 255))
def test_one_changed_byte_never_crashes(tmp_path_factory: pytest.TempPathFactory, position: int, value: int) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "w.safetensors"
    path.write_bytes(GOOD[:position] + bytes([value]) + GOOD[position + 1 :])
    message = f"{path}: "
    try:
        CheckpointTensors.open_file(path).take("a", (2, 3))
    except CheckpointError as error:
        message = str(error)
    assert str(path) in message
    assert "\n" not in message


def test_take_names_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.ones(2, 3), "i": torch.ones(2, dtype=torch.int64)}, path)
    tensors = CheckpointTensors.open_file(path)
    assert "tensor c is missing" in refusal(lambda: tensors.take("c", (1,)))
    assert "tensor a has shape [2, 3], the config asks for [3, 2]" in refusal(lambda: tensors.take("a", (3, 2)))
    assert "tensor i has dtype I64" in refusal(lambda: tensors.take("i", (2,)))


def test_a_file_replaced_by_a_directory(tmp_path: Path) -> None:
    assert "cannot read" in refusal(lambda: read_header(tmp_path))
