"""``nosa eval`` on a tiny checkpoint: files, overrides, refusals, and the shipped recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml

from tests.cli.conftest import Nosa

ROOT = Path(__file__).resolve().parents[2]
SPARSE = (
    "{block_size: 16, kernel_size: 16, kernel_stride: 8, topk: 5, init_blocks: 1, window_size: 16, select_blocks: 2}"
)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.txt").write_text(" ".join(f"The square of {n + i} is {n * n}." for n in range(60)))
    return folder


@pytest.fixture
def recipe(tmp_path: Path, checkpoint: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"name: x\nsparse: {SPARSE}\ncontexts: [400]\ndocuments: 2\nbuckets: 2\nmass_positions: 4\nbaseline: dense\n"
        "tasks: [passkey]\ncases: 1\ndepths: [0.5]\ngeneration_documents: 1\ngeneration_prompt: 150\n"
        "generation_tokens: 8\nsubjects:\n"
        f"  - {{name: dense, model: {checkpoint}, method: full, head: none}}\n"
        f"  - {{name: nosa, model: {checkpoint}}}\n"
    )
    return path


def test_rows_and_figures_are_left(nosa: Nosa, recipe: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = nosa("eval", recipe, "--texts", texts, "--out", out, "--json")
    assert done.status == 0, done.err
    rows = pd.read_parquet(out / "rows.parquet")
    assert set(rows["kind"]) == {"perplexity", "task", "generation"}
    assert json.loads((out / "summary.json").read_text()) == done.document
    (figure,) = [
        row
        for row in done.document["figures"]
        if (row["subject"], row.get("part"), row["kind"]) == ("nosa", "all", "perplexity")
    ]
    assert figure["ratio_to_dense_low"] <= figure["ratio_to_dense"]
    assert figure["misses_per_head_step"] > 0
    assert figure["gpu_bytes"] > 0
    assert len(done.document["texts"]) == 3
    assert "95 % intervals" in done.err


def test_parts_and_subjects_can_be_left_out(nosa: Nosa, recipe: Path, texts: Path, tmp_path: Path) -> None:
    arguments = ["--only", "nosa", "--cases", "0", "--generations", "0", "--documents", "1"]
    done = nosa("eval", recipe, "--texts", texts, "--out", tmp_path / "out", *arguments, "--json")
    assert done.status == 0, done.err
    rows = pd.read_parquet(tmp_path / "out" / "rows.parquet")
    assert set(rows["subject"]) == {"nosa"}
    assert set(rows["kind"]) == {"perplexity"}
    assert rows["document"].nunique() == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "best"], "no subject 'best'; known: dense, nosa"),
        (["--documents", "9"], "3 of 3 texts have the 400 tokens"),
        (["--texts", "/no/texts"], "no such folder"),
        (["--device", "npx"], "device='npx' is no torch device"),
        pytest.param(
            ["--device", "cuda"],
            "this torch sees none",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here"),
        ),
    ],
)
def test_wrong_requests_are_one_line(
    nosa: Nosa, recipe: Path, texts: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = nosa("eval", recipe, "--texts", texts, "--out", tmp_path / "out", *arguments)
    assert done.status == 2
    assert message in done.err
    assert len(done.err.splitlines()) == 1 or "tokens" in message, "only the texts' tokens are counted after the table"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_all_missing_files_are_named_before_anything_is_read(
    nosa: Nosa, recipe: Path, tmp_path: Path, dry: tuple[str, ...]
) -> None:
    """Not even the texts: there are none here. Each missing file is named once, and none that is there."""
    (tmp_path / "there.safetensors").touch()
    (tmp_path / "folder").mkdir()
    with recipe.open("a") as file:
        for name, keys in {
            "a": f"adapter: {tmp_path}/a.safetensors",
            "b": f"adapter: {tmp_path}/a.safetensors, model: {tmp_path}/gone",
            "c": f"adapter: {tmp_path}/there.safetensors, model: smollm2-135m",
            "d": f"adapter: {tmp_path}/folder, model: smollm2-136m",
        }.items():
            file.write(f"  - {{name: {name}, {keys}}}\n")
    arguments = ("eval", recipe, "--texts", tmp_path / "no-texts", "--out", tmp_path / "out", *dry)
    done = nosa(*arguments)
    assert done.status == 2
    (line,) = done.err.splitlines()
    missing = [f"{tmp_path}/a.safetensors", f"{tmp_path}/folder", f"{tmp_path}/gone", "smollm2-136m"]
    assert f"not there: {', '.join(missing)}; nosa train makes" in line
    assert "there.safetensors" not in line
    assert not (tmp_path / "out").exists()
    others = nosa(*arguments, "--only", "dense,nosa,c", "--dry-run")
    assert others.status == 0, others.err


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").glob("eval-*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_are_valid(
    nosa: Nosa, path: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all is there that they name: empty files serve a dry run."""
    monkeypatch.chdir(tmp_path)
    for subject in yaml.safe_load(path.read_text())["subjects"]:
        for name in (subject.get("adapter"), subject.get("model")):
            if name is not None:
                Path(name).parent.mkdir(parents=True, exist_ok=True)
                Path(name).touch()
    done = nosa("eval", path, "--texts", texts, "--out", tmp_path / "done", "--dry-run", "--json")
    assert done.status == 0, done.err
    assert len(done.document["subjects"]) >= 3
