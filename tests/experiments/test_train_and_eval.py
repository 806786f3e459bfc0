"""Training and evaluation in sessions: what is left out goes on, archives carry rows to another machine."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from nosa_sys.experiments.train_and_eval import main
from tests.cli.tiny_checkpoint import write_checkpoint

SPARSE = (
    "{block_size: 16, kernel_size: 16, kernel_stride: 8, topk: 5, init_blocks: 1, window_size: 16, select_blocks: 2}"
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, texts and recipes, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "base")
    (tmp_path / "texts").mkdir()
    for i in range(8):
        text = " ".join(f"The square of {n + i} is {n * n}." for n in range(60))
        (tmp_path / "texts" / f"{i}.txt").write_text(text)
    (tmp_path / "train.yaml").write_text(
        f"model: {tmp_path / 'base'}\nsparse: {SPARSE}\nlength: 128\nsteps: 3\nstreams: 2\nheld_out: 0.3\n"
        "name: x\ntrained: low_rank\nrank: 2\nruns:\n  - {name: dense, method: full, head: none}\n  - {name: nosa}\n"
        "seeds: [0, 1]\n"
    )
    dense, nosa = (f"out/train/{name}-seed0/adapter.safetensors" for name in ("dense", "nosa"))
    (tmp_path / "eval.yaml").write_text(
        f"name: x\nsparse: {SPARSE}\ncontexts: [300]\ndocuments: 2\nbuckets: 2\nmass_positions: 4\nbaseline: dense\n"
        "tasks: [passkey]\ncases: 1\ndepths: [0.5]\ngeneration_documents: 1\ngeneration_prompt: 150\n"
        "generation_tokens: 8\nsubjects:\n"
        f"  - {{name: dense, model: base, adapter: {dense}, method: full, head: none}}\n"
        f"  - {{name: nosa, model: base, adapter: {nosa}}}\n"
    )
    return tmp_path


def session(*arguments: object) -> int:
    common = ["--train", "train.yaml", "--texts", "texts", "--eval", "eval.yaml", "--eval-texts", "texts"]
    return main([*common, "--device", "cpu", "--results", "results", *map(str, arguments)])


def told(place: Path) -> dict[str, Any]:
    return json.loads((place / "results" / "session.json").read_text())


def figures(place: Path) -> list[dict[str, Any]]:
    return json.loads((place / "out" / "eval" / "summary.json").read_text())["figures"]


def test_one_session_does_everything_and_brings_it_back(place: Path) -> None:
    assert session("--bring", "nosa-seed0,dense-seed1") == 0
    assert [row["run"] for row in told(place)["training"]] == ["dense-seed0", "nosa-seed0", "dense-seed1", "nosa-seed1"]
    files = {file.name for file in (place / "results").iterdir()}
    assert files == {
        "results.tar.xz",
        "session.json",
        *(f"{r}.adapter.safetensors" for r in ("nosa-seed0", "dense-seed1")),
    }
    with tarfile.open(place / "results" / "results.tar.xz") as archive:
        names = set(archive.getnames())
    assert {"train/nosa-seed1/loss.jsonl", "eval/rows-nosa.parquet", "eval/summary.json"} <= names
    assert not any("checkpoint" in name or name.endswith(".safetensors") for name in names)
    kinds = {(row["subject"], row["kind"]) for row in figures(place)}
    assert kinds == {(s, k) for s in ("dense", "nosa") for k in ("perplexity", "task", "generation")}


def test_sessions_without_time_add_up_to_the_same(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nosa_sys.experiments import train_and_eval_stages as stages

    monkeypatch.setattr(stages, "_SAVING_S", 0.0)
    monkeypatch.setattr(stages, "_FIRST_SUBJECT_S", 1e-9)
    assert session("--out", place / "whole") in (0, 3)  # its subjects lie elsewhere
    assert session("--minutes", 1e-9) == 3
    assert not any(row["finished"] for row in told(place)["training"])
    assert session("--only", "dense", "--seed", 0) == 3
    assert [row["run"] for row in told(place)["training"]] == ["dense-seed0"]
    assert session("--only", "dense") == 3
    assert [row["finished"] for row in told(place)["evaluation"]["eval"]] == [True, False]
    before = figures(place)
    assert session() == 0
    assert [row["finished"] for row in told(place)["evaluation"]["eval"]] == [True, True]
    after = [row for row in figures(place) if row["subject"] == "dense"]
    assert [row.get("perplexity") for row in after] == [row.get("perplexity") for row in before]
    for run in ("dense-seed0", "nosa-seed1"):
        logs = [
            [json.loads(line)["loss"] for line in (root / "train" / run / "loss.jsonl").open()]
            for root in (place / "whole", place / "out")
        ]
        assert logs[0] == logs[1]


def test_an_earlier_archive_is_read_back_and_strange_ones_are_refused(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert session() == 0
    rows = pd.read_parquet(place / "out" / "eval" / "rows-nosa.parquet")
    (place / "results" / "results.tar.xz").rename(place / "earlier.tar.xz")
    (place / "out").rename(place / "gone")
    assert session("--earlier", place / "earlier.tar.xz", "--minutes", 1e-9) == 0
    pd.testing.assert_frame_equal(rows, pd.read_parquet(place / "out" / "eval" / "rows-nosa.parquet"))
    with tarfile.open(place / "strange.tar.xz", "w:xz") as archive:
        archive.add(place / "base" / "model.safetensors", "model.safetensors")
    assert session("--earlier", place / "strange.tar.xz") == 2
    assert "more than logs and rows" in capsys.readouterr().err
    assert session("--earlier", place / "train.yaml") == 2
    assert "is no results.tar.xz" in capsys.readouterr().err


def test_an_evaluation_alone_reads_what_was_trained_before(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = ["--eval", "eval.yaml", "--eval-texts", "texts", "--device", "cpu", "--results", "alone"]
    assert main(alone) == 3  # no adapter is there yet
    assert session("--seed", 0, "--only", "nosa,dense") == 0
    (place / "out" / "eval").rename(place / "gone")
    assert main(alone) == 0
    pd.testing.assert_frame_equal(
        *(pd.read_parquet(root / "rows-nosa.parquet") for root in (place / "gone", place / "out/eval"))
    )
    assert main(["--results", "alone", "--device", "cpu"]) == 2
    assert "nothing to do" in capsys.readouterr().err
    assert main([*alone, "--minutes", "nan"]) == 2
    assert "--minutes nan" in capsys.readouterr().err
    assert main(["--train", "train.yaml", "--results", "alone", "--device", "cpu"]) == 2
    assert "--train needs --texts" in capsys.readouterr().err


def test_what_names_no_run_or_no_folder_is_no_finished_session(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert session("--only", "nonsense") == 2
    assert "no such run" in capsys.readouterr().err
    assert session("--seed", 9) == 2
    assert "no such run" in capsys.readouterr().err
    assert not (place / "results").exists()
    (place / "results").write_text("a file")
    assert session() == 2
    assert "--results results cannot be made" in capsys.readouterr().err


def test_an_earlier_archive_with_a_broken_byte_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "rows.json").write_text(json.dumps([f"{n * n * 7919 % 1000003}" for n in range(4000)]))
    with tarfile.open(place / "broken.tar.xz", "w:xz") as archive:
        archive.add(place / "rows.json", "rows.json")
    raw = bytearray((place / "broken.tar.xz").read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    (place / "broken.tar.xz").write_bytes(raw)
    assert session("--earlier", place / "broken.tar.xz") == 2
    assert "is no results.tar.xz" in capsys.readouterr().err


def test_rows_and_runs_of_another_recipe_are_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder's figures are all of one recipe and of one set of texts; subjects may be added."""
    assert session("--seed", 0) == 0
    rows = (place / "out/eval/rows-nosa.parquet").read_bytes()
    summary = (place / "out/eval/summary.json").read_text()

    def refused(message: str, *arguments: object) -> None:
        assert session("--seed", 0, *arguments) == 2
        assert message in capsys.readouterr().err
        assert (place / "out/eval/summary.json").read_text() == summary

    refused("documents 2, not 3", "--documents", 3)
    refused("steps=3, this run has 4", "--steps", 4)
    recipe = (place / "eval.yaml").read_text()
    (place / "eval.yaml").write_text(recipe.replace("buckets: 2", "buckets: 3"))
    refused("buckets 2, not 3")
    (place / "eval.yaml").write_text(
        recipe.replace("{name: nosa, model: base", "{name: nosa, model: base, method: dma")
    )
    refused("subject nosa")
    (place / "eval.yaml").write_text(recipe)
    (place / "texts/0.txt").rename(place / "0.txt")
    assert main(["--eval", "eval.yaml", "--eval-texts", "texts", "--device", "cpu", "--results", "results"]) == 2
    assert "evaluated with texts" in capsys.readouterr().err
    (place / "0.txt").rename(place / "texts/0.txt")
    (place / "out/eval/recipe.json").unlink()  # as sessions of earlier versions left it
    refused("documents 2, not 3", "--documents", 3)
    adapter = "out/train/nosa-seed0/adapter.safetensors"
    (place / "eval.yaml").write_text(recipe + f"  - {{name: more, model: base, method: dma, adapter: {adapter}}}\n")
    assert session("--seed", 0) == 0
    assert {row["subject"] for row in figures(place)} == {"dense", "nosa", "more"}
    assert (place / "out/eval/rows-nosa.parquet").read_bytes() == rows


@pytest.mark.parametrize("name", ["rows-nosa.parquet", "written.json", "recipe.json"])
def test_what_a_killed_session_left_broken_is_named(place: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert session("--seed", 0) == 0
    if name == "written.json":
        (place / "out/eval/rows-nosa.parquet").unlink()
    path = place / "out/eval" / name
    path.write_bytes(path.read_bytes()[:20])
    assert session("--seed", 0) == 2
    error = capsys.readouterr().err
    assert f"out/eval/{name} cannot be read" in error
    assert error.count("\n") == 1


def test_recipes_that_would_share_a_folder_are_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "more").mkdir()
    (place / "more" / "eval.yaml").write_text((place / "eval.yaml").read_text())
    assert session("--eval", "more/eval.yaml") == 2
    assert "two recipes are called eval" in capsys.readouterr().err
    assert session("--only", "nosa,nonsense") == 2
    assert "no such run: 'nonsense'" in capsys.readouterr().err
