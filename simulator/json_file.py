"""Read a JSON object out of a file that others may have written: size checked, no NaN and no Infinity accepted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from nosa_sys.errors import HardwareError


def read_json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """The object in ``path``. HardwareError naming the file for more than ``max_bytes``, for what is no JSON, and for
    what is no object."""
    try:
        n_bytes = path.stat().st_size
        if n_bytes > max_bytes:
            raise HardwareError(f"{path} has {n_bytes} bytes, more than the limit of {max_bytes}")
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant, parse_int=_whole)
    except (OSError, ValueError, RecursionError) as error:
        raise HardwareError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise HardwareError(f"{path} must hold a JSON object")
    return data


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not allowed")


def _whole(text: str) -> int:
    value = int(text)
    if abs(value) > sys.float_info.max:
        raise ValueError(f"{text[:20]}... of {len(text)} digits is too large a number")
    return value
