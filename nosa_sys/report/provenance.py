"""Provenance: device, versions, seed, command and revision behind every input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nosa_sys.report.inputs import ReportInputs


def _short(path: Path) -> str:
    """The last two folders: many traces are called trace."""
    return "/".join(path.absolute().parts[-2:])


def provenance_rows(inputs: ReportInputs) -> list[list[Any]]:
    """Head row, then one row of (input, fact, value)."""
    rows: list[list[Any]] = [["input", "fact", "value"]]
    for source in inputs.traces:
        meta = source.trace.meta
        name = f"trace {_short(source.trace.directory)}"
        facts = {
            "status": meta.status,
            "device": meta.device,
            "driver": meta.driver,
            "link": meta.pcie,
            "model": f"{meta.model.name}, {meta.kv_dtype}, host {meta.host_kv_dtype}, head {meta.head}",
            "sizes assumed": ", ".join(meta.model.assumed),
            "versions": ", ".join(f"{key} {value}" for key, value in meta.versions.items()),
            "git revision": meta.git_revision,
            "seed": str(meta.seed),
            "command": str(source.capture.get("command", "")),
            "sequences": f"{len(meta.sequences)} of {', '.join(f'{s.prompt_tokens:,}' for s in meta.sequences[:8])} "
            "prompt tokens",
            "notes": "; ".join(source.trace.notes),
        }
        rows += [[name, key, value] for key, value in facts.items() if value]
    for sweep in inputs.sweeps:
        name = f"sweep {_short(sweep.path)}"
        for key, value in sweep.summary.items():
            if isinstance(value, (str, int, float, bool)):
                rows.append([name, key, str(value)])
            elif isinstance(value, list) and all(isinstance(item, str) for item in value):
                rows.append([name, key, "; ".join(value)])
    for prediction in inputs.predictions:
        notes = [*prediction.get("assumptions", []), *prediction.get("rules", [])]
        rows.append(
            [
                "prediction",
                "status",
                f"{prediction.get('status')}, hardware {prediction.get('hardware')}: {'; '.join(map(str, notes))}",
            ]
        )
    for validation in inputs.validations:
        for key in ("status", "device", "hardware", "hardware_device", "model_shape", "weights", "exceeded"):
            if value := validation.get(key):
                text = "; ".join(map(str, value)) if isinstance(value, list) else str(value)
                rows.append([f"validation {validation.get('name')}", key, text])
    seen: list[str] = []
    for replay in inputs.replays:
        for assumption in replay.get("assumptions", []):
            if assumption not in seen:
                seen.append(assumption)
                rows.append(["replays", "assumption", assumption])
    return rows
