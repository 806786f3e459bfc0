"""Training runs: the loss falls, frozen weights stay, a resumed run equals an unbroken one, exports load again."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nosa_sys.engine.prefill import prefill_logits
from nosa_sys.errors import CheckpointError, ConfigError, NumericsError
from nosa_sys.models.load import LoadedModel, load_model
from nosa_sys.training import checkpoint
from nosa_sys.training.export import check_rank
from nosa_sys.training.loop import Trainer, learning_rate_share
from nosa_sys.training.recipe import TrainSettings, build, parse_train_recipe
from nosa_sys.training.text_sources import DocumentTexts, TextSource
from nosa_sys.training.texts import Document
from tests.training.small import SHAPE, SPARSE, ByteTokenizer, tiny, tokens


def documents() -> list[Document]:
    """Repetitive texts, so that there is something to learn from far away."""
    words = ["alpha", "beta", "gamma", "delta", "omega"]
    return [Document(f"{i}.txt", " ".join(words[(i * n + n * n) % 5] for n in range(120))) for i in range(12)]


def settings(**changes: Any) -> TrainSettings:
    small = {"length": 112, "batch": 2, "steps": 8, "streams": 3, "held_out": 0.3, "held_out_sequences": 1}
    rest = {"evaluate_every": 4, "checkpoint_every": 3, "warmup_steps": 2, "rank": 2}
    return TrainSettings(name="t", sparse=SPARSE, **{**small, **rest, **changes})


def trainer(directory: Path, *, resume: bool = False, texts: TextSource | None = None, **changes: Any) -> Trainer:
    chosen = settings(**changes)
    texts = texts or DocumentTexts(documents(), chosen.held_out)
    loaded = LoadedModel(tiny(head=chosen.head), "tiny", [], ByteTokenizer())
    return Trainer(chosen, texts, directory, resume=resume, loaded=loaded)


@pytest.mark.parametrize("trained", ["head", "all", "low_rank"])
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(trained: str, tmp_path: Path) -> None:
    """Stopped after every step, so that each step begins from files."""
    whole = trainer(tmp_path / "whole", trained=trained)
    whole.run()
    for step in range(8):
        part = trainer(tmp_path / "parts", resume=True, trained=trained)
        assert part.step == step
        assert part.run(stop_after_s=0.0)["step"] == step + 1
    for name, tensor in whole.model.parameters.items():
        assert torch.equal(tensor, part.model.parameters[name]), name
    logs = [(tmp_path / name / "loss.jsonl").read_text().splitlines() for name in ("whole", "parts")]
    for left, right in zip(*(map(json.loads, log) for log in logs), strict=True):
        assert {**left, "tokens_per_s": 0} == {**right, "tokens_per_s": 0}
    assert len(list((tmp_path / "parts").glob("checkpoint-*"))) == 1


def test_an_interrupted_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    """Rows after the checkpoint are dropped from the log and made again."""
    whole = trainer(tmp_path / "whole")
    whole.run()

    def interrupt(row: dict[str, Any]) -> None:
        if row["step"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "part").run(on_row=interrupt)
    again = trainer(tmp_path / "part", resume=True)
    assert again.step == 3
    again.run()
    assert [json.loads(line)["step"] for line in (tmp_path / "part" / "loss.jsonl").open()] == [*range(1, 9)]
    for name, tensor in whole.model.parameters.items():
        assert torch.equal(tensor, again.model.parameters[name]), name


@pytest.mark.parametrize("trained", ["head", "low_rank"])
def test_frozen_weights_stay_bit_for_bit_and_others_move(trained: str, tmp_path: Path) -> None:
    run = trainer(tmp_path, trained=trained)
    frozen = {name: tensor.clone() for name, tensor in run.model.frozen().items()}
    learning = {name: tensor.detach().clone() for name, tensor in run.model.parameters.items()}
    run.run()
    assert {"embedding", "model.layers.1.qkv"} <= set(frozen)
    for name, tensor in run.model.frozen().items():
        assert torch.equal(tensor, frozen[name]), name
    for name, tensor in run.model.parameters.items():
        assert not torch.equal(tensor, learning[name]), name


def test_case_29_the_loss_falls(tmp_path: Path) -> None:
    run = trainer(tmp_path, steps=20, trained="all", weights_lr=1e-2)
    run.run()
    losses = [json.loads(line)["loss"] for line in (tmp_path / "loss.jsonl").open()]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


@pytest.mark.parametrize("seed", [0, 1])
def test_seeds_are_reproducible_and_differ(seed: int, tmp_path: Path) -> None:
    losses = []
    for name, used in (("a", seed), ("b", seed), ("c", seed + 1)):
        trainer(tmp_path / name, seed=used, steps=2).run()
        losses.append([json.loads(line)["loss"] for line in (tmp_path / name / "loss.jsonl").open()])
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize(("method", "head"), [("nosa", "ed_dma"), ("infllmv2", "none"), ("full", "none")])
def test_low_rank_adapters_load_again(method: str, head: str, tmp_path: Path) -> None:
    """From files alone: a checkpoint of the base and the adapter give the trained model, factors rounded to bf16."""
    from nosa_sys.training.export import write_checkpoint

    base = tmp_path / "base"
    write_checkpoint(base, tiny(head=head), None)
    run = trainer(tmp_path / "run", trained="low_rank", method=method, head=head, weights_lr=0.05)
    document = run.run()
    assert document["adapter"] == "adapter.safetensors"
    loaded = load_model(base, head=head, adapter=tmp_path / "run" / "adapter.safetensors")
    assert any("rank 2" in note for note in loaded.notes)
    ids = tokens(110).tolist()
    got = prefill_logits(loaded.model, ids, SPARSE, method=method).logits
    expected = prefill_logits(run.model.engine_model(), ids, SPARSE, method=method).logits
    plain = prefill_logits(tiny(head=head), ids, SPARSE, method=method).logits
    assert (got - expected).norm() < 0.03 * (plain - expected).norm()


def test_whole_models_load_again(tmp_path: Path) -> None:
    run = trainer(tmp_path, trained="all", weights_lr=1e-2)
    assert run.run()["model"] == "model"
    loaded = load_model(tmp_path / "model")
    ids = tokens(110).tolist()
    got = prefill_logits(loaded.model, ids, SPARSE).logits
    assert torch.equal(got, prefill_logits(run.model.engine_model(), ids, SPARSE).logits)


def test_head_adapters_load_again(tmp_path: Path) -> None:
    from nosa_sys.training.export import write_checkpoint

    write_checkpoint(tmp_path / "base", tiny(head="none"), None)
    run = trainer(tmp_path / "run")
    run.run()
    loaded = load_model(tmp_path / "base", adapter=tmp_path / "run" / "adapter.safetensors")
    assert loaded.notes[0].startswith("eviction head from adapter.safetensors: t: head trained for 8 steps of 224 tok")
    for ours, theirs in zip(loaded.model.layers, run.model.base.layers, strict=True):
        assert torch.equal(ours.A, theirs.A)
        assert torch.equal(ours.delta, theirs.delta)


def test_resuming_something_else_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path).run(stop_after_s=0.0)
    with pytest.raises(ConfigError, match=r"settings head_lr=0\.02, this run has 0\.5"):
        trainer(tmp_path, resume=True, head_lr=0.5)
    with pytest.raises(ConfigError, match=r"texts (held_out_)?sha256"):
        trainer(tmp_path, resume=True, texts=DocumentTexts(documents()[:-1], 0.3))
    state = next(tmp_path.glob("checkpoint-1")) / "state.json"
    state.write_text("{")
    with pytest.raises(CheckpointError, match="no state of a training run"):
        checkpoint.latest(tmp_path)


def test_a_loss_that_is_no_number_stops(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    with torch.no_grad():
        run.model.base.final_norm.fill_(float("nan"))
    with pytest.raises(NumericsError, match="the loss of step 1 is nan"):
        run.run()


def test_learning_rates() -> None:
    cosine, constant = settings(steps=12), settings(steps=12, schedule="constant")
    assert [learning_rate_share(s, constant) for s in range(12)] == [0.5, *[1.0] * 11]
    shares = [learning_rate_share(s, cosine) for s in range(13)]
    assert shares[:3] == [0.5, 1.0, 1.0]
    assert shares[2:] == sorted(shares[2:], reverse=True)
    assert shares[12] == pytest.approx(0.1)


def test_rank_is_held_to_16_mib() -> None:
    from nosa_sys.model_shape import ModelShape

    shape = ModelShape.preset("smollm2-135m")
    check_rank(shape, 8)
    with pytest.raises(ConfigError, match="largest that fits is 30"):
        check_rank(shape, 40)
    check_rank(SHAPE, 1000)


# ---- recipes
def test_recipes_vary_by_runs_and_seeds() -> None:
    data = {"sparse": {"topk": 32}, "runs": [{"name": "a"}, {"name": "b", "method": "dma"}], "seeds": [1, 2], "clip": 2}
    runs = parse_train_recipe({**data, "sparse": {"topk": 40}}, "r")
    assert [run.directory for run in runs] == ["a-seed1", "a-seed2", "b-seed1", "b-seed2"]
    assert (runs[3].method, runs[3].sparse.topk, runs[3].clip) == ("dma", 40, 2.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stepz": 1}, "unknown key 'stepz'"),
        ({"steps": "many"}, "steps='many' must be of type int"),
        ({"steps": True}, "must be of type int"),
        ({"steps": 0}, "steps=0 must be >= 1"),
        ({"clip": 0}, "clip=0"),
        ({"schedule": "linear"}, "must be one of cosine, constant"),
        ({"trained": "some"}, "trained='some' must be one of head, all"),
        ({"name": "../x"}, "name="),
        ({"method": "nosa", "sparse": {"select_blocks": 0}}, "select_blocks=0 must be >= 1"),
        ({"sparse": {"topc": 3}}, "unknown sparse key"),
        ({"runs": []}, "runs must be a list"),
        ({"seeds": [0, 0]}, "two runs are called"),
        ({"name": None}, "must be of type str"),
    ],
)
def test_recipe_faults_name_the_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="recipe.yaml: .*" + message):
        parse_train_recipe({"name": "x", **copy.deepcopy(change)}, "recipe.yaml")
    with pytest.raises(ConfigError, match="name is missing"):
        build(TrainSettings, {}, "recipe.yaml")
