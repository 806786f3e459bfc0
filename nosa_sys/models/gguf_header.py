"""Check of a GGUF's metadata sizes before the ``gguf`` package reads them: it follows a length past the end of the
file without an error, for as long as the length says."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from nosa_sys.errors import CheckpointError

STRING, ARRAY = 8, 9
VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
MIN_ELEMENT_BYTES = {**VALUE_BYTES, STRING: 8, ARRAY: 12}
READ_VERSIONS = (2, 3)
FIXED_HEADER_BYTES = 24  # magic, version, number of tensors, number of metadata keys
MAX_ARRAY_DEPTH = 4


def check_metadata_sizes(path: Path) -> None:
    """Walk a GGUF's metadata; CheckpointError where a length runs past the end of the file, or if it is big-endian.

    Another kind of file passes: the reader that comes next names what is wrong with it.
    """
    try:
        if path.stat().st_size < FIXED_HEADER_BYTES:
            return
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            magic, version, _, n_keys = struct.unpack_from("<4sIQQ", data)
            if magic == b"GGUF" and version & 0xFFFF == 0:
                raise CheckpointError(f"{path} is a big-endian GGUF file; only little-endian ones are read")
            if magic == b"GGUF" and version in READ_VERSIONS:
                _Walk(path, data).keys(n_keys)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None


class _Walk:
    """A position in the metadata that moves on value by value and never past the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, FIXED_HEADER_BYTES

    def keys(self, n_keys: int) -> None:
        for _ in range(n_keys):
            self._string()
            self._value(self._number("<I"))

    def _value(self, kind: int, depth: int = 0) -> None:
        if kind in VALUE_BYTES:
            self._skip(VALUE_BYTES[kind])
        elif kind == STRING:
            self._string()
        elif kind == ARRAY and depth < MAX_ARRAY_DEPTH:
            element, length = self._number("<I"), self._number("<Q")
            if element in VALUE_BYTES:
                self._skip(length * VALUE_BYTES[element])
                return
            self._need(length * MIN_ELEMENT_BYTES.get(element, 1))
            for _ in range(length):
                self._value(element, depth + 1)
        else:
            raise CheckpointError(f"{self._path} is no whole GGUF file: metadata of type {kind} at byte {self._at}")

    def _string(self) -> None:
        self._skip(self._number("<Q"))

    def _number(self, layout: str) -> int:
        at, size = self._at, struct.calcsize(layout)
        self._skip(size)
        return int(struct.unpack_from(layout, self._data, at)[0])

    def _skip(self, n_bytes: int) -> None:
        self._need(n_bytes)
        self._at += n_bytes

    def _need(self, n_bytes: int) -> None:
        if n_bytes > len(self._data) - self._at:
            raise CheckpointError(
                f"{self._path} is no whole GGUF file: its metadata want {n_bytes} bytes at byte {self._at}, the file "
                f"has {len(self._data)}"
            )
