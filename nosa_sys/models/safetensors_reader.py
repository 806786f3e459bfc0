"""Checkpoints in safetensors files, single or sharded, read as untrusted input.

A header is believed only after its sizes have been held against the file: nothing is allocated from a number that
a file merely claims. Every failure is a CheckpointError naming the file and, where there is one, the tensor.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nosa_sys.errors import CheckpointError

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
ELEMENT_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8,
}  # fmt: skip
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 8
MAX_FILE_NAME = 200  # file systems end at 255 bytes


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: its file, safetensors dtype name and shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Header:
    """The checked header of one file."""

    entries: dict[str, TensorEntry]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """Read and check one file's header: JSON, dtypes, shapes, and every offset against the file's size in bytes."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path}: {file_bytes} bytes is no safetensors file (header length is 8 bytes)")
            (header_bytes,) = struct.unpack("<Q", prefix)
            if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
                raise CheckpointError(
                    f"{path}: header of {header_bytes} bytes does not fit in a file of {file_bytes} bytes; "
                    "the file is truncated or no safetensors file"
                )
            raw = file.read(header_bytes)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise CheckpointError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: the header is not valid JSON") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header must be a JSON object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map names to strings")
    data_bytes = file_bytes - 8 - header_bytes
    return Header({name: _check_entry(path, name, entry, data_bytes) for name, entry in header.items()}, metadata)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _check_entry(path: Path, name: str, entry: Any, data_bytes: int) -> TensorEntry:
    where = f"{path}: tensor {name}"
    if not name.isprintable():
        raise CheckpointError(f"{path}: tensor name {name!r} holds control characters")
    kind = entry.get("dtype") if isinstance(entry, dict) else entry
    if not isinstance(entry, dict) or not isinstance(kind, str) or kind not in ELEMENT_BYTES:
        raise CheckpointError(f"{where} has unknown dtype {kind!r}")
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(_is_size(size) for size in shape):
        raise CheckpointError(f"{where} has no valid shape: {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise CheckpointError(f"{where} has no valid data_offsets: {offsets!r}")
    begin, end = offsets
    needed = math.prod(shape) * ELEMENT_BYTES[kind]
    if end - begin != needed:
        raise CheckpointError(
            f"{where} of shape {shape} {kind} needs {needed} bytes but its offsets span {end - begin}"
        )
    if end > data_bytes:
        raise CheckpointError(
            f"{where} ends at data byte {end} but the file holds {data_bytes}; it is truncated, download it again"
        )
    return TensorEntry(path, kind, tuple(shape))


class CheckpointTensors:
    """The tensors of one checkpoint by name, over one file or many; data is mapped, not read, until used."""

    def __init__(self, entries: dict[str, TensorEntry], source: Path, metadata: dict[str, str] | None = None) -> None:
        self.entries = entries
        self.source = source
        self.metadata = metadata or {}
        self._open_files: dict[Path, Any] = {}

    @classmethod
    def open_file(cls, path: Path) -> CheckpointTensors:
        """All tensors of one safetensors file."""
        header = read_header(path)
        return cls(header.entries, path, header.metadata)

    @classmethod
    def open_directory(cls, directory: Path) -> CheckpointTensors:
        """model.safetensors where there is one, else the shards that model.safetensors.index.json names."""
        if (directory / SINGLE_FILE).exists():
            return cls.open_file(directory / SINGLE_FILE)
        index = directory / INDEX_FILE
        if not index.exists():
            raise CheckpointError(
                f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}; other weight formats are not read"
            )
        weight_map = _read_index(index)
        headers = {}
        for shard in sorted(set(weight_map.values())):
            if not (directory / shard).is_file():
                raise CheckpointError(f"shard {directory / shard} is missing; {INDEX_FILE} names it")
            headers[shard] = read_header(directory / shard)
        for name, shard in weight_map.items():
            if name not in headers[shard].entries:
                raise CheckpointError(f"tensor {name} is missing from {directory / shard}, where {INDEX_FILE} puts it")
        entries: dict[str, TensorEntry] = {}
        for header in headers.values():
            entries |= header.entries
        return cls(entries | {name: headers[shard].entries[name] for name, shard in weight_map.items()}, index)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor as stored. CheckpointError when it is missing, of another shape, or of no floating dtype."""
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.source}: tensor {name} is missing (expected shape {list(shape)})")
        if entry.shape != shape:
            raise CheckpointError(
                f"{entry.file}: tensor {name} has shape {list(entry.shape)}, the config asks for {list(shape)}"
            )
        if entry.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{entry.file}: tensor {name} has dtype {entry.dtype}; only {', '.join(FLOAT_DTYPES)} are read, "
                "so dequantise the checkpoint first"
            )
        try:
            if entry.file not in self._open_files:
                self._open_files[entry.file] = safe_open(entry.file, framework="pt")
            return self._open_files[entry.file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{entry.file}: tensor {name} cannot be read: {error}") from None


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map of tensor names to files")
    for name, shard in weight_map.items():
        plain = isinstance(shard, str) and shard not in ("", ".", "..") and not set(shard) & set("/\\:")
        if not plain or not shard.isprintable() or len(shard) > MAX_FILE_NAME or not name.isprintable():
            raise CheckpointError(f"{path}: tensor {name!r} lies in {shard!r}, no plain file name beside the index")
    return weight_map
