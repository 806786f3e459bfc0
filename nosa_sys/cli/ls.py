"""``nosa ls``: the traces, replays, predictions and sweeps under a directory, and the names that options take."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

from nosa_sys.cli import console as out
from nosa_sys.cli.options import JsonFlag
from nosa_sys.errors import ConfigError, TraceError
from nosa_sys.methods import METHODS
from nosa_sys.model_shape import PRESETS
from nosa_sys.traces.schema import META_FILE, TraceMeta

NAME = "ls"
_DOCUMENTS = {"replay.json": "replay", "prediction.json": "prediction", "summary.json": "sweep"}
_MAX_DEPTH = 4


def command(
    roots: Annotated[list[Path] | None, typer.Argument(metavar="[DIR]...", help="Where to look (default out).")] = None,
    json: JsonFlag = False,
) -> None:
    """List outputs under directories, and the known hardware profiles, model shapes and methods.

    Example: [bold]nosa ls out[/bold]
    """
    from nosa_sys.simulator.hardware import known_profiles
    from nosa_sys.simulator.link import OWN_LINK, known_links
    from nosa_sys.simulator.locality.registry import locality_names

    asked = roots or [Path("out")]
    for root in asked:
        if roots and not root.is_dir():
            raise ConfigError(f"no such directory: {root}")
    found = [entry for root in asked if root.is_dir() for entry in find_outputs(root)]
    names = {
        "hardware": known_profiles(),
        "links": [OWN_LINK, *known_links()],
        "model_shapes": list(PRESETS),
        "methods": list(METHODS),
        "locality": locality_names(),
    }
    console = out.human(json)
    console.print(
        out.table("Outputs", ("path", "kind", "what"), [(e["path"], e["kind"], e["what"]) for e in found])
        if found
        else f"no outputs under {', '.join(str(r) for r in asked)}"
    )
    console.print(out.facts("\nNames", [(key, ", ".join(value)) for key, value in names.items()]))
    if json:
        out.print_json({"kind": "list", "outputs": found, **names})


def find_outputs(root: Path, depth: int = 0) -> list[dict[str, Any]]:
    """Every output directory at or below ``root``, in name order."""
    entry = describe(root)
    found = [entry] if entry else []
    if depth < _MAX_DEPTH and (entry is None or entry["kind"] != "trace"):
        for child in sorted(root.iterdir()):
            if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
                found += find_outputs(child, depth + 1)
    return found


def describe(path: Path) -> dict[str, Any] | None:
    """Kind and a line of facts, None where the directory is no output; a broken one says so."""
    if (path / META_FILE).is_file() and not (path / "models.json").is_file():  # that one is a hardware profile
        try:
            meta = TraceMeta.load(path)
        except TraceError as error:
            return {"path": str(path), "kind": "trace", "what": f"broken: {error}"}
        what = f"{meta.model.name}, {meta.method}, k={meta.sparse.topk}, slots={meta.slots}, {meta.n_steps} steps"
        return {"path": str(path), "kind": "trace", "what": what if meta.complete else what + ", incomplete"}
    for name, kind in _DOCUMENTS.items():
        if (path / name).is_file():
            try:
                data = json_module.loads((path / name).read_text(encoding="utf-8"))
            except (ValueError, OSError) as error:
                return {"path": str(path), "kind": kind, "what": f"broken: {error}"}
            return {"path": str(path), "kind": kind, "what": _line(kind, data if isinstance(data, dict) else {})}
    return None


def _line(kind: str, data: dict[str, Any]) -> str:
    if kind == "replay":
        return f"{data.get('method')}, slots={data.get('slots')}, {data.get('policy')}"
    if kind == "prediction":
        return f"{data.get('status')}, {out.number(data.get('tokens_per_s'))} tokens/s"
    return f"{out.number(data.get('n_configurations'))} configurations"
