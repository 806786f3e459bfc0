"""YAML as people write numbers in it: 4e5 and 1e-3 are floats, as in YAML 1.2; PyYAML's own rule makes them text."""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """SafeLoader with exponents that need neither point nor sign."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def safe_load(text: str) -> Any:
    """Plain values of one document, as ``yaml.safe_load``.

    >>> safe_load("{rope_theta: 4e5, rate: 1e-3, name: 4e5x}")
    {'rope_theta': 400000.0, 'rate': 0.001, 'name': '4e5x'}
    """
    return yaml.load(text, Loader=_Loader)  # a SafeLoader
