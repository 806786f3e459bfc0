"""Write a profile bundle: a few JSON files and one Parquet file an operation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from nosa_sys.errors import HardwareError
from nosa_sys.profiling.fits import LinearFit
from nosa_sys.simulator.hardware import PROFILE_SCHEMA_VERSION, load_hardware


def write_bundle(
    directory: Path,
    *,
    name: str,
    device: str,
    status: str,
    notes: str,
    tables: dict[str, list[dict[str, Any]]],
    fits: dict[str, LinearFit],
    models: dict[str, tuple[float | None, str]],
    environment: dict[str, str],
    choices: dict[str, Any] | None = None,
) -> None:
    """Fill ``directory`` (there already, see nosa_sys.outputs) and check that the simulator loads it.

    ``models`` are the simulator's numbers, each with its source; ``choices`` are what an engine should use
    here. Raises HardwareError when an operation has no rows or the bundle does not load.
    """
    for table, rows in tables.items():
        if not rows:
            raise HardwareError(f"operation {table} has no measured points; profile again")
        pd.DataFrame(rows).to_parquet(directory / f"{table}.parquet", compression="zstd", index=False)

    def save(file: str, data: Any) -> None:
        (directory / file).write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    meta = {"schema_version": PROFILE_SCHEMA_VERSION, "name": name, "device": device, "status": status, "notes": notes}
    save("meta.json", meta)
    save("models.json", {key: {"value": value, "source": source} for key, (value, source) in models.items()})
    save("fits.json", {key: fit.to_dict() for key, fit in fits.items()})
    save("environment.json", environment)
    if choices is not None:
        save("choices.json", choices)
    load_hardware(directory)
