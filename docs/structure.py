"""Writes docs/structure.md out of the first sentence of every module's docstring (run: make structure)."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "nosa_sys": "What both halves share: configuration, model shapes, methods, errors.",
    "nosa_sys/cli": "The `nosa` command, one file a verb.",
    "nosa_sys/engine": "The engine: decodes with two memory tiers and records what it does. Needs torch.",
    "nosa_sys/models": "Llama with the eviction head, and everything that loads one.",
    "nosa_sys/profiling": "Measures a device and writes profile bundles for the simulator.",
    "nosa_sys/report": "The HTML report.",
    "nosa_sys/training": "Trains eviction heads and weights, evaluates what the engine decodes with them. Needs torch.",
    "kernels": "One folder an operation: the reference in torch is the definition, fast versions stand beside it.",
    "simulator": "Predicts step times from misses and a hardware profile. Loads no torch.",
    "traces": "The trace schema, writer, reader, check, replay and statistics. Loads no torch.",
    "experiments": "Captures, replays and sweeps put together, with their recipes.",
}
HEAD = """# Structure

Two halves meet in trace files: the engine (real, decodes and records) and the simulator (predicts).
Dependencies point downward only: cli -> experiments -> {engine, simulator} -> traces; engine -> kernels;
the simulator never imports the engine. `nosa_sys/kernels`, `simulator`, `traces` and `experiments` are relative
symlinks to the folders at the top, so that everything is imported as `nosa_sys...`.

This page is made from the modules' own docstrings by `make structure`.
"""


def folders() -> dict[str, str]:
    """Folder -> purpose; packages of nosa_sys that the table above does not know yet come last."""
    found = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "nosa_sys").glob("*/__init__.py")}
    own = {name for name in found if not (ROOT / name).is_symlink()}
    return FOLDERS | dict.fromkeys(sorted(own - set(FOLDERS)), "")


def modules(folder: str) -> list[Path]:
    """Python files of a folder; kernels and the like are searched to the bottom, nosa_sys is not."""
    base = ROOT / folder
    found = base.glob("*.py") if folder == "nosa_sys" else base.rglob("*.py")
    return sorted(path for path in found if path.read_text(encoding="utf-8").strip())


def sentence(path: Path) -> str:
    """First paragraph of the docstring up to its first full stop, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(text.split("\n\n")[0].split())
    end = first.find(". ")
    return (first if end < 0 else first[: end + 1]).replace("|", "\\|")


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for folder, purpose in folders().items():
        lines = [f"## {folder}/", "", *([purpose, ""] if purpose else []), "| module | what it is |", "|---|---|"]
        lines += [f"| `{path.relative_to(ROOT)}` | {sentence(path)} |" for path in modules(folder)]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    (ROOT / "docs" / "structure.md").write_text(page(), encoding="utf-8")
