"""Resolved settings: every value with its origin (default, flag, file, trace or derived), and the start-up banner.

A flag that was not given is None and never hides a value from a file; a flag that was given always wins.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from rich.console import Console

from nosa_sys.cli import console as out
from nosa_sys.errors import ConfigError
from nosa_sys.yaml_numbers import safe_load

T = TypeVar("T")
_MAX_CONFIG_BYTES = 2**20


def read_yaml_mapping(path: Path, known: Iterable[str]) -> dict[str, Any]:
    """A YAML mapping whose keys are all known; the error names the nearest known key."""
    if not path.is_file():
        raise ConfigError(f"no such file: {path}")
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} has {path.stat().st_size} bytes, more than the limit of {_MAX_CONFIG_BYTES}")
    try:
        data = safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # impossible dates and huge numbers are ValueErrors
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a YAML mapping of option names to values")
    names = sorted(known)
    for key in data:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            raise ConfigError(
                f"{path}: unknown key {key!r}; "
                + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}")
            )
    return data


@dataclass
class Settings:
    """Collects values in the order they are resolved. ``file`` holds the parsed --config, if any."""

    file: Mapping[str, Any] = field(default_factory=dict)
    rows: list[tuple[str, Any, str]] = field(default_factory=list)

    def pick(self, name: str, flag: T | None, default: T, origin: str = "default") -> T:
        """The flag, else the file's value, else ``default`` (whose origin may be 'trace' or 'derived').

        A value of another type than the default in the file is a ConfigError.
        """
        value, source = self.find(name, flag, type(default) if default is not None else None)
        if source is None:
            return self.note(name, default, origin)
        return self.note(name, value, source)

    def find(self, name: str, flag: Any, kind: type | None) -> tuple[Any, str | None]:
        """(value, origin) from flag or file, or (None, None); not noted yet."""
        if flag is not None:
            return flag, "flag"
        if self.file.get(name) is None:
            return None, None
        value = self.file[name]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            try:
                value = float(value)
            except OverflowError:
                raise ConfigError(f"{name} in the config file is too large for a number") from None
        if kind is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise ConfigError(f"{name}={value!r} in the config file must be of type {kind.__name__}")
        return value, "file"

    def note(self, name: str, value: T, origin: str) -> T:
        """Record a value that needs no resolving."""
        self.rows.append((name, value, origin))
        return value

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """For the JSON document: name -> {value, origin}."""
        return {name: {"value": value, "origin": origin} for name, value, origin in self.rows}

    def banner(self, console: Console, title: str) -> None:
        """Print every value and where it came from."""
        console.print(
            out.table(
                title,
                ("setting", "value", "from"),
                [(name, value if isinstance(value, str) else out.number(value), src) for name, value, src in self.rows],
            )
        )
