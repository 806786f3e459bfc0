"""LinkDescription: the link between host and device apart from the device, so that one device can be priced on another.

Descriptions are JSON files in ``links/``, or a user's own: ``{"name", "notes"}`` and for each number
``{"value": ..., "source": "..."}``. None was measured with the device that it is combined with: projections.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nosa_sys.errors import HardwareError
from nosa_sys.simulator.json_file import read_json_object

OWN_LINK = "own"  # the link that a profile was measured on
MAX_LINK_BYTES = 2**16
MAX_NUMBER = 1e18  # above any link or memory; sums of such numbers stay finite
LINK_NUMBERS = ("h2d_fixed_us", "h2d_gbps", "d2h_fixed_us", "d2h_gbps", "duplex_factor")
_BUILT_IN = Path(__file__).parent / "links"
_TEXTS = ("name", "notes", "sources")


@dataclass(frozen=True)
class LinkDescription:
    """One direction's transfer of n bytes alone takes ``*_fixed_us + n / *_gbps``; GB/s are decimal.

    ``duplex_factor``: share of its speed that a copy keeps while both directions move bytes, in [0.5, 1].
    ``host_memory_bytes``: capacity at the far end, None for that of the device's profile.
    """

    name: str
    h2d_fixed_us: float
    h2d_gbps: float
    d2h_fixed_us: float
    d2h_gbps: float
    duplex_factor: float
    host_memory_bytes: float | None
    sources: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: str = ""


def known_links() -> list[str]:
    """Names of the links that ship with the package."""
    return sorted(p.stem for p in _BUILT_IN.glob("*.json"))


def load_link(link: str | Path | LinkDescription) -> LinkDescription:
    """A link by its name or its file, or itself. HardwareError naming the file and the key at fault.

    >>> load_link("pcie4-x16").h2d_gbps
    25.6
    """
    if isinstance(link, LinkDescription):
        return link
    path = _BUILT_IN / f"{link}.json" if str(link) in known_links() else Path(link)
    if not path.is_file():
        raise HardwareError(f"unknown link {str(link)!r}; known: {', '.join((OWN_LINK, *known_links()))}, or a file")
    data = read_json_object(path, MAX_LINK_BYTES)
    numbers = [f.name for f in dataclasses.fields(LinkDescription) if f.name not in _TEXTS]
    wanted = {"name", "notes", *numbers}
    if set(data) != wanted:
        wrong = sorted(set(data) ^ wanted)
        raise HardwareError(f"{path} must have exactly the keys {', '.join(sorted(wanted))}; at fault: {wrong[0]}")
    if not isinstance(data["name"], str) or not isinstance(data["notes"], str) or data["name"] in ("", OWN_LINK):
        raise HardwareError(f"{path}: name and notes must be texts, and the name not empty nor {OWN_LINK!r}")
    values, sources = {}, {}
    for key in numbers:
        entry = data[key]
        if not isinstance(entry, dict) or set(entry) != {"value", "source"} or not isinstance(entry["source"], str):
            raise HardwareError(f'{path}: {key} must be {{"value": number, "source": "text"}}')
        if not entry["source"].strip():
            raise HardwareError(f"{path}: {key} needs a source")
        values[key], sources[key] = _number(key, entry["value"], path), entry["source"]
    return LinkDescription(name=data["name"], notes=data["notes"], sources=sources, **values)  # type: ignore[arg-type]


def _number(key: str, value: Any, path: Path) -> float | None:
    if value is None and key == "host_memory_bytes":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise HardwareError(f"{path}: {key}={value!r} must be a finite number")
    low, high = {"duplex_factor": (0.5, 1.0)}.get(key, (0.0 if key.endswith("_us") else 1e-9, MAX_NUMBER))
    if not low <= value <= high:
        raise HardwareError(f"{path}: {key}={value!r} must be in [{low:g}, {high:g}]")
    return float(value)
