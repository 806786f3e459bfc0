"""Committed result files: rows by column name, with the device, versions and command that they come from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nosa_sys.errors import TraceError
from nosa_sys.report.inputs import read_json, read_parquet
from nosa_sys.simulator.hardware import HardwareProfile, profile_directory
from nosa_sys.traces.schema import status_kind


@dataclass(frozen=True)
class Origin:
    """Where numbers of one kind (measured, injected, validated, projected) come from; what is unknown is empty."""

    kind: str
    file: str
    device: str
    facts: dict[str, str] = field(default_factory=dict)


Row = dict[str, Any]


@dataclass(frozen=True)
class ResultRows:
    """Rows of one file (none where it is not there) and the document around them."""

    file: str
    rows: list[Row]
    document: dict[str, Any]

    def having(self, *columns: str, **equal: Any) -> list[Row]:
        """Rows that were not skipped, have a finite number in each of ``columns`` and these values elsewhere."""
        return [
            row
            for row in self.rows
            if not row.get("skipped")
            and all(is_number(row.get(name)) for name in columns)
            and all(row.get(name) == value for name, value in equal.items())
        ]

    def origins(self, rows: list[Row]) -> tuple[Origin, ...]:
        """One for every kind among the rows' own ``status``; a row without one is the document's, or measured."""
        own = str(self.document.get("status", "measured"))
        kinds = [status_kind(str(row.get("status") or own)) for row in rows]
        return tuple(self.origin(kind) for kind in dict.fromkeys(kinds))

    def origin(self, kind: str) -> Origin:
        """Device, versions, command and revision as the document states them."""
        facts = self.document.get("facts") or self.document.get("environment") or self.document
        names = ("driver", "pcie", "git_revision", "command", "seeds", "capture")
        found = {name: str(facts[name]) for name in names if facts.get(name)}
        versions = facts.get("versions") or {k: facts[k] for k in ("torch", "triton", "cuda") if facts.get(k)}
        if versions:
            found["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
        if self.document.get("error"):
            found["broke off"] = str(self.document["error"])
        return Origin(kind, self.file, str(facts.get("device", "device not stated")), found)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def read_rows(root: Path, path: str, key: str = "rows") -> ResultRows:
    """Rows of ``root/path``, a JSON document with a list ``key``; TraceError for a file that is something else."""
    file = root / path
    shown = file.as_posix()
    if not file.is_file():
        return ResultRows(shown, [], {})
    document = read_json(file)
    rows = document.pop(key, None)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise TraceError(f"{file} needs a list of {key}")
    return ResultRows(shown, rows, document)


def profile_table(profile: str, name: str) -> ResultRows:
    """A table of a profile's bundle, such as link_runs; no rows where it has none."""
    directory = profile_directory(profile)
    file = directory / f"{name}.parquet"
    shown = f"profile {directory.name}, {file.name}"
    if not file.is_file():
        return ResultRows(shown, [], {})
    environment = directory / "environment.json"
    facts = read_json(environment) if environment.is_file() else {}
    rows = [{str(name): value for name, value in row.items()} for row in read_parquet(file).to_dict("records")]
    return ResultRows(shown, rows, {"facts": facts, "status": "measured"})


def simulated(profile: HardwareProfile, *notes: str) -> Origin:
    """The origin of a projection made here: the profile, how it prices a step, and the rules beside."""
    prices = "terms fitted to engine runs" if profile.engine is not None else "kernels measured one by one"
    facts = {"profile": f"{profile.name} ({profile.status}), a step priced by {prices}", "command": "nosa results"}
    facts["rules"] = "; ".join(note for note in notes if note)
    return Origin("projected", f"simulator, profile {profile.name}", profile.device, facts)


def merged(origins: Sequence[Origin]) -> tuple[Origin, ...]:
    """Without repetitions, in their order."""
    found: dict[tuple[str, str], Origin] = {}
    for origin in origins:
        found.setdefault((origin.kind, origin.file), origin)
    return tuple(found.values())
