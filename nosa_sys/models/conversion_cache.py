"""The cache of converted GGUF files: one safetensors file each, with config and tokenizer in its metadata."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from nosa_sys.errors import CheckpointError, NosaError
from nosa_sys.models.config import LlamaConfig
from nosa_sys.models.safetensors_reader import CheckpointTensors
from nosa_sys.models.tokenizer import Tokenizer

CONVERTER_VERSION = 2
RECORD_KEY = "nosa_sys"  # one key: safetensors writes several in an order of its own, and the bytes should not vary


@dataclass(frozen=True)
class ConvertedModel:
    """A converted checkpoint, opened."""

    tensors: CheckpointTensors
    config: LlamaConfig
    tokenizer: Tokenizer


def cache_directory() -> Path:
    """$NOSA_CACHE, else ~/.cache/nosa-sys."""
    chosen = os.environ.get("NOSA_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "nosa-sys"


def open_converted(gguf: Path, name: str) -> ConvertedModel:
    """The converted form of ``gguf``, converting it when the cache has none or a broken one.

    The key is the sha256 of the GGUF with the converter's version, so another file or program never meets an old
    conversion; the file is replaced in one step, so readers see a whole one or none.
    """
    try:
        with gguf.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read {gguf}: {error.strerror}") from None
    path = cache_directory() / f"{name}-{digest[:16]}-v{CONVERTER_VERSION}.safetensors"
    if path.exists():
        with contextlib.suppress(NosaError):  # a torn or foreign file is converted again, over it
            return _open(path, digest)
    _convert(gguf, name, path, digest)
    return _open(path, digest)


def _open(path: Path, digest: str) -> ConvertedModel:
    tensors = CheckpointTensors.open_file(path)
    try:
        record = json.loads(tensors.metadata[RECORD_KEY])
        if record["gguf_sha256"] != digest:
            raise CheckpointError(f"{path} was made from another GGUF")
        config = LlamaConfig.from_dict(record["config"])
        tokenizer = Tokenizer.from_json(record["tokenizer"], record["tokenizer_settings"], path)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: metadata are not a converted model's: {error}") from None
    return ConvertedModel(tensors, config, tokenizer)


def _convert(gguf: Path, name: str, path: Path, digest: str) -> None:
    from safetensors.numpy import save_file

    from nosa_sys.models.gguf_convert import GgufModel

    model = GgufModel(gguf, name)
    record = {
        "gguf_sha256": digest,
        "config": model.config.to_dict(),
        "tokenizer": model.tokenizer_json,
        "tokenizer_settings": model.tokenizer_settings,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=path.parent) as scratch:
            whole = Path(scratch) / path.name
            save_file(dict(model.tensors()), whole, metadata={RECORD_KEY: json.dumps(record)})
            os.replace(whole, path)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}; point NOSA_CACHE at a folder with room"
        ) from None
