"""Training runs: the loss falls, frozen weights stay, a resumed run equals an unbroken one, exports load again."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nosa_sys.engine.prefill import prefill_logits
from nosa_sys.errors import CheckpointError, ConfigError, NumericsError
from nosa_sys.experiments.training_cases import documents, settings, trainer
from nosa_sys.experiments.training_checks import frozen_row, resumed_row
from nosa_sys.models.load import load_model
from nosa_sys.training import checkpoint
from nosa_sys.training.data import PackedSequences
from nosa_sys.training.export import check_rank
from nosa_sys.training.loop import Trainer, learning_rate_share
from nosa_sys.training.recipe import TRAINED, TrainSettings, build, parse_train_recipe
from nosa_sys.training.text_sources import DocumentTexts
from tests.training.small import SHAPE, SPARSE, tiny, tokens


@pytest.mark.parametrize("trained", TRAINED)
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(trained: str, tmp_path: Path) -> None:
    """Stopped after every step, so that each begins from files: parameters, moments, losses, place in the texts."""
    row = resumed_row(trained, tmp_path)
    assert row["resumed_at"] == [*range(8)]
    assert (row["n_tensors_different"], row["n_log_rows_different"], row["same_state"]) == (0, 0, True)
    assert row["n_tensors"] == 3 * {"head": 4, "all": 18, "low_rank": 20}[trained]
    assert row["n_log_rows"] == 8
    assert len(list((tmp_path / "broken").glob("checkpoint-*"))) == 1


def test_a_resumed_run_without_its_moments_or_its_place_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: what a checkpoint restores is compared."""
    whole = checkpoint.restore

    def forgetful(saved: Any, parameters: Any, optimizer: torch.optim.Optimizer) -> None:
        whole(saved, parameters, optimizer)
        for parameter in parameters.values():
            optimizer.state[parameter]["exp_avg_sq"].zero_()

    monkeypatch.setattr(checkpoint, "restore", forgetful)
    row = resumed_row("head", tmp_path / "moments")
    assert row["n_tensors_different"] > 0
    monkeypatch.setattr(checkpoint, "restore", whole)
    monkeypatch.setattr(PackedSequences, "restore", lambda self, state: None)
    row = resumed_row("head", tmp_path / "place")
    assert row["n_log_rows_different"] > 0
    assert not row["same_state"]


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
    """Every tensor of the base against a model made anew."""
    row = frozen_row(trained, tmp_path)
    assert (row["n_frozen"], row["n_learning"]) == (2 + 2 * 6, {"head": 4, "low_rank": 20}[trained])
    assert (row["n_steps"], row["n_frozen_changed"], row["n_learning_still"]) == (8, 0, 0)


def test_a_frozen_weight_that_moves_by_a_bit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer.train_step

    def leaking(self: Trainer) -> dict[str, Any]:
        norm = self.model.base.layers[1].mlp_norm
        norm[3] = torch.nextafter(norm[3], torch.tensor(9.0))
        return step(self)

    monkeypatch.setattr(Trainer, "train_step", leaking)
    assert frozen_row("head", tmp_path)["changed"] == ["1.mlp_norm"]


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


def test_an_adapter_says_under_which_rotary_base_it_was_trained(tmp_path: Path) -> None:
    """Though the recipe named none: it may be the model's own, or that of the adapter which the run began with."""
    from nosa_sys.training.export import write_checkpoint

    write_checkpoint(tmp_path / "base", tiny(head="none"), None)
    run = trainer(tmp_path / "run", steps=2)
    run.loaded.model.config = dataclasses.replace(run.loaded.model.config, rope_theta=7e4)
    run.run()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["settings"]["rope_theta"] is None
    loaded = load_model(tmp_path / "base", adapter=tmp_path / "run" / "adapter.safetensors")
    assert loaded.model.config.rope_theta == 7e4
    assert "rope_theta 70000 taken from the adapter's record" in loaded.notes


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
