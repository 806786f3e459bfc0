"""Random models drawn where they live: sizes, dtypes, moments, and that nothing is held twice."""

from __future__ import annotations

import weakref

import pytest
import torch

from nosa_sys.model_shape import ModelShape
from nosa_sys.models.config import LlamaConfig
from nosa_sys.models.llama import LlamaModel
from nosa_sys.models.random import DeviceTensors, random_tensors

SHAPE = ModelShape("tiny", 2, 4, 2, 64, 256, 512, 400, dtype="bfloat16")


def drawn(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> DeviceTensors:
    return DeviceTensors(SHAPE, seed, dtype, torch.device("cpu"))


def test_names_and_sizes_are_those_of_a_whole_checkpoint() -> None:
    whole = random_tensors(SHAPE, torch.Generator().manual_seed(0))
    assert {name: tensor.shape for name, tensor in drawn().items()} == {n: t.shape for n, t in whole.items()}


def test_tensors_come_in_the_models_dtype_but_for_the_head() -> None:
    for name, tensor in drawn().items():
        wanted = torch.float32 if name.endswith(("self_attn.A", "delta.weight")) else torch.bfloat16
        assert tensor.dtype == wanted, name


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_matrices_have_variance_one_over_fan_in(name: str) -> None:
    tensor = drawn()[name].float()
    assert tensor.std().item() == pytest.approx(tensor.shape[1] ** -0.5, rel=0.02)
    assert abs(tensor.mean().item()) < 0.01


def test_values_follow_the_seed_alone_and_are_never_kept() -> None:
    tensors, name = drawn(3), "model.layers.0.mlp.gate_proj.weight"
    first = tensors[name]
    again = drawn(3)
    _ = again["lm_head.weight"]
    assert torch.equal(first, again[name])
    assert not torch.equal(first, drawn(4)[name])
    assert not torch.equal(first, tensors["model.layers.1.mlp.gate_proj.weight"])
    watched = weakref.ref(first)
    del first
    assert watched() is None


def test_a_model_is_built_from_them() -> None:
    model = LlamaModel(LlamaConfig(SHAPE), drawn())
    assert model.dense_logits(torch.arange(5)).isfinite().all()
    assert model.layers[0].A.abs().min() >= 0.5
