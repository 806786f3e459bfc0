"""Locality models by name: simple, fitted:NAME for one that comes with the package, fitted:FILE.json for another."""

from __future__ import annotations

from pathlib import Path

from nosa_sys.errors import ConfigError
from nosa_sys.simulator.locality.fitted import fitted_names, load_fitted, packaged_path
from nosa_sys.simulator.locality_model import LocalityModel, ScoreModel

SIMPLE = "simple"
_FITTED = "fitted:"


def locality_names() -> list[str]:
    """Every name that `get_locality` knows without a file."""
    return [SIMPLE, *(_FITTED + name for name in fitted_names())]


def get_locality(name: str) -> ScoreModel:
    """Look a model up; the error lists the known ones."""
    if name == SIMPLE:
        return LocalityModel()
    if name.startswith(_FITTED):
        wanted = name.removeprefix(_FITTED)
        if wanted in fitted_names():
            return load_fitted(packaged_path(wanted))
        if wanted.endswith(".json") and Path(wanted).is_file():
            return load_fitted(wanted)
    raise ConfigError(
        f"unknown locality model {name!r}; known: {', '.join(locality_names())}, or fitted:FILE.json with a file that "
        "nosa locality fit wrote"
    )
