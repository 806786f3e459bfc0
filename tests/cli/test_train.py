"""``nosa train`` on a tiny checkpoint: runs, resumption, refusals, and what the shipped recipes ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Nosa

ROOT = Path(__file__).resolve().parents[2]
SPARSE = (
    "{block_size: 16, kernel_size: 16, kernel_stride: 8, topk: 5, init_blocks: 1, window_size: 16, select_blocks: 2}"
)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.txt").write_text(" ".join(str(n * n * (i + 1)) for n in range(60)))
    return folder


@pytest.fixture
def recipe(tmp_path: Path, checkpoint: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {checkpoint}\nsparse: {SPARSE}\nlength: 128\nsteps: 3\nstreams: 2\nheld_out: 0.3\nname: x\n"
        "runs:\n  - {name: head}\n  - {name: dense, method: full, head: none, trained: all}\n"
    )
    return path


def test_runs_leave_adapters_models_and_logs(nosa: Nosa, recipe: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = nosa("train", recipe, "--texts", texts, "--out", out, "--json")
    assert done.status == 0, done.err
    rows = {row["run"]: row for row in done.document["runs"]}
    assert rows["head-seed0"]["adapter"] == "adapter.safetensors"
    assert rows["dense-seed0"]["model"] == "model"
    for run in rows:
        lines = [json.loads(line) for line in (out / run / "loss.jsonl").open()]
        assert [line["step"] for line in lines] == [1, 2, 3]
        assert lines[-1]["held_out_loss"] == pytest.approx(rows[run]["held_out_loss"])
        listed = json.loads((out / run / "texts.json").read_text())
        assert len(listed) == 8
        assert {text["held_out"] for text in listed} == {True, False}
    assert "head-seed0" in done.err
    again = nosa("train", recipe, "--texts", texts, "--out", out)
    assert again.status == 2
    assert "--resume to go on, or --overwrite" in again.err


def test_sessions_add_up_to_one_run(nosa: Nosa, recipe: Path, texts: Path, tmp_path: Path) -> None:
    common = ["train", recipe, "--texts", texts, "--only", "head", "--json"]
    whole = nosa(*common, "--out", tmp_path / "whole").document["runs"][0]
    first = nosa(*common, "--out", tmp_path / "parts", "--stop-after", "0.000001")
    assert "--resume goes on" in first.err
    assert first.document["runs"][0]["finished"] is False
    last = nosa(*common, "--out", tmp_path / "parts", "--resume").document["runs"][0]
    assert last["finished"]
    assert last["loss_last_10"] == whole["loss_last_10"]
    assert nosa(*common, "--out", tmp_path / "parts", "--resume").document["runs"] == []
    other = nosa(*common, "--out", tmp_path / "parts", "--resume", "--steps", 9)
    assert other.status == 2
    assert "this run has 9" in other.err
    (tmp_path / "parts" / "head-seed0" / "summary.json").write_text("{")
    assert "is no summary of a training run" in nosa(*common, "--out", tmp_path / "parts", "--resume").err


def test_a_token_pack_serves_as_texts(nosa: Nosa, recipe: Path, texts: Path, tmp_path: Path) -> None:
    pack = tmp_path / "pack.safetensors"
    made = nosa("train", recipe, "--texts", texts, "--pack", pack)
    assert made.status == 0, made.err
    assert "3 sequences length128.streams2.seed0" in made.err
    assert "already exists" in nosa("train", recipe, "--texts", texts, "--pack", pack).err
    rows = [
        nosa("train", recipe, "--texts", source, "--only", "head", "--out", tmp_path / name, "--json")
        for name, source in (("plain", texts), ("packed", pack))
    ]
    plain, packed = (done.document["runs"][0] for done in rows)
    assert plain["held_out_loss"] == packed["held_out_loss"]
    assert plain["texts"] == packed["texts"]


def test_a_token_pack_keeps_the_rules_of_every_verb(nosa: Nosa, recipe: Path, texts: Path, tmp_path: Path) -> None:
    """A dry run writes nothing, --json tells, folders are made, what cannot be written is one line."""
    pack = tmp_path / "made here" / "pack.safetensors"
    common = ("train", recipe, "--texts", texts, "--only", "head", "--json")
    planned = nosa(*common, "--pack", pack, "--dry-run")
    assert (planned.status, planned.document["dry_run"], pack.exists()) == (0, True, False)
    made = nosa(*common, "--pack", pack)
    assert (made.status, pack.is_file()) == (0, True)
    assert made.document["sequences"]["length128.streams2.seed0"] == 3
    (tmp_path / "dir.safetensors").mkdir()
    (tmp_path / "file").write_text("")
    for path, message in (
        (tmp_path / "dir.safetensors", "is a directory"),
        (tmp_path / "file" / "pack.safetensors", "is a file"),
    ):
        done = nosa(*common, "--pack", path, "--overwrite")
        assert (done.status, message in done.err) == (2, True)
    assert "trains nothing" in nosa(*common, "--pack", pack, "--overwrite", "--out", tmp_path / "out").err
    assert "--out is missing" in nosa("train", recipe, "--texts", pack).err
    assert "must end in .safetensors" in nosa("train", recipe, "--texts", texts, "--pack", tmp_path / "x.npy").err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nosa"], "no run 'nosa'; known: head, dense"),
        (["--seed", "5"], "the recipe has seeds 0"),
        (["--attention", "flash"], "attention='flash' must be one of sdpa, flex, triton"),
        (["--texts", "/no/texts"], "no such folder"),
        (["--device", "npx"], "device='npx' is no torch device"),
        pytest.param(
            ["--device", "cuda"],
            "this torch sees none",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here"),
        ),
        (["--resume", "--overwrite"], "give only one"),
    ],
)
def test_wrong_requests_are_one_line(
    nosa: Nosa, recipe: Path, texts: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = nosa("train", recipe, "--texts", texts, "--out", tmp_path / "out", *arguments)
    assert done.status == 2
    assert message in done.err
    assert len(done.err.splitlines()) == 1, done.err


def test_overwrite_replaces_runs_alone(nosa: Nosa, recipe: Path, texts: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "head-seed0").mkdir(parents=True)
    (tmp_path / "out" / "head-seed0" / "thesis.tex").write_text("mine")
    done = nosa("train", recipe, "--texts", texts, "--out", tmp_path / "out", "--overwrite")
    assert done.status == 2
    assert "not of a training run" in done.err


def test_case_28_flags_win_over_every_run_and_defaults_over_none(
    nosa: Nosa, checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    """The file's values where no flag is given, also where one run has its own; the flag's in every run."""
    path = tmp_path / "own.yaml"
    path.write_text(
        f"model: {checkpoint}\nsparse: {SPARSE}\nlength: 128\nsteps: 3\nattention: flex\nname: x\n"
        "runs:\n  - {name: a}\n  - {name: b, steps: 7, attention: sdpa}\n"
    )

    def planned(*flags: object) -> list[tuple[int, str]]:
        done = nosa("train", path, "--texts", texts, "--out", tmp_path / "out", "--dry-run", "--json", *flags)
        assert done.status == 0, done.err
        return [(run["steps"], run["attention"]) for run in done.document["runs"]]

    assert planned() == [(3, "flex"), (7, "sdpa")]
    assert planned("--steps", 5) == [(5, "flex"), (5, "sdpa")]
    assert planned("--attention", "sdpa") == [(3, "sdpa"), (7, "sdpa")]


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").glob("train-*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_are_valid(nosa: Nosa, path: Path, texts: Path, tmp_path: Path) -> None:
    done = nosa("train", path, "--texts", texts, "--out", tmp_path / "out", "--dry-run", "--json")
    assert done.status == 0, done.err
    for run in done.document["runs"]:
        assert run["sparse"]["topk"] * run["sparse"]["block_size"] <= run["length"] / 4
    if path.stem == "train-all":
        assert {run["name"] for run in done.document["runs"]} == {"dense", "infllmv2", "dma", "nosa"}
        assert (
            len({json.dumps({**run, "name": 0, "method": 0, "head": 0, "seed": 0}) for run in done.document["runs"]})
            == 1
        )
