"""Outputs that are there whole or not at all: written beside their place, then renamed into it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nosa_sys.errors import ConfigError

# A directory that holds one of these was made by nosa and may be replaced with --overwrite.
_OURS = (
    *("meta.json", "replay.json", "prediction.json", "summary.json", "recipe.yaml", "demo.json", "validation.json"),
    "adapter.json",
)


def partial_path(path: Path) -> Path:
    """Where ``path`` is being written."""
    return path.with_name(path.name + ".partial")


def check_output(path: Path, *, overwrite: bool, reads: Path | None = None) -> None:
    """Refuse early, before any work, what could not be written in the end, or would replace the input ``reads``."""
    if reads is not None and path.resolve() in (reads.resolve(), *reads.resolve().parents):
        raise ConfigError(f"{path} is or holds {reads}, which is read here; choose another --out")
    if path.is_dir():
        entries = list(path.iterdir())
        if entries and not overwrite:
            raise ConfigError(f"{path} already exists; give --overwrite to replace it, or another --out")
        if entries and not any((path / name).exists() for name in _OURS):
            raise ConfigError(f"{path} holds files that nosa did not write; choose another --out")
    elif path.exists() and not overwrite:
        raise ConfigError(f"{path} already exists; give --overwrite to replace it, or another --out")
    for parent in path.absolute().parents:
        if parent.exists():
            if not parent.is_dir():
                raise ConfigError(f"{parent} is a file, so {path} cannot be made inside it")
            if not os.access(parent, os.W_OK):
                raise ConfigError(f"{parent} is not writable, so {path} cannot be made")
            break


@contextmanager
def whole_directory(path: Path, *, overwrite: bool, keep_when_interrupted: bool = False) -> Iterator[Path]:
    """Yield a sibling ``NAME.partial`` directory that takes the place of ``path`` when the block ends well.

    On an error it is removed; after Ctrl-C it stays when ``keep_when_interrupted`` (its whole steps can be read).
    """
    check_output(path, overwrite=overwrite)
    partial = partial_path(path)
    if partial.exists():
        if not overwrite:
            raise ConfigError(f"{partial} is left from an interrupted run; read it, or give --overwrite to start again")
        check_output(partial, overwrite=True)
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
    except KeyboardInterrupt:
        if not keep_when_interrupted:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if path.is_dir():
        old = Path(tempfile.mkdtemp(prefix=f".{path.name[:100]}.old-", dir=path.parent))
        path.rename(old / path.name)
        partial.rename(path)
        shutil.rmtree(old)
    else:
        path.unlink(missing_ok=True)
        partial.rename(path)


@contextmanager
def whole_file(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a sibling ``NAME.partial`` to write, which takes the place of ``path`` when the block ends well."""
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; give a file name")
    check_output(path, overwrite=overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, text: str, *, overwrite: bool) -> None:
    """Write a text file through a temporary neighbour."""
    with whole_file(path, overwrite=overwrite) as partial:
        partial.write_text(text, encoding="utf-8")
