"""LlamaModel's logits, betas and rotations against transformers' LlamaForCausalLM."""

from __future__ import annotations

import dataclasses
import math
import pydoc_data.topics

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from nosa_sys.model_shape import ModelShape
from nosa_sys.models.config import LlamaConfig, RopeScaling
from nosa_sys.models.conversion_cache import open_converted
from nosa_sys.models.load import LoadedModel
from nosa_sys.models.random import random_model, random_tensors
from nosa_sys.models.smollm2 import find_gguf
from nosa_sys.models.weights import base_tensors

SHAPE = ModelShape("tiny", 2, 8, 2, 24, 72, 96, 101, dtype="float32")
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
SCALINGS = {"default": {}, "linear": {"factor": 4.0}, "llama3": LLAMA3}


def hf_model(config: LlamaConfig, tensors: dict[str, torch.Tensor]) -> transformers.LlamaForCausalLM:
    """transformers' model with the same weights, the eviction head left out."""
    shape = config.shape
    hf_config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_q_heads,
        num_key_value_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=shape.tied_embedding,
        max_position_embeddings=config.max_positions,
        rope_parameters={
            "rope_type": config.rope_scaling.kind,
            "rope_theta": config.rope_theta,
            **config.rope_scaling.factors,
        },
    )
    with torch.device("meta"):  # weights are given, so drawing random ones first would only take time
        hf = transformers.LlamaForCausalLM(hf_config)
    hf.model.rotary_emb = LlamaRotaryEmbedding(hf_config)
    weights = {name: tensors[name] for name, _ in base_tensors(shape)}
    if shape.tied_embedding:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    hf.load_state_dict(weights, assign=True)
    return hf.eval()


@torch.no_grad()
def logit_difference(config: LlamaConfig, n_tokens: int) -> float:
    model = random_model(config.shape, seed=3, config=config)
    tokens = torch.randint(0, config.shape.vocab_size, (n_tokens,), generator=torch.Generator().manual_seed(5))
    ours = model.dense_logits(tokens)
    tensors = random_tensors(config.shape, torch.Generator().manual_seed(3))
    theirs = hf_model(config, tensors)(tokens[None]).logits[0]
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(8, 2), (6, 2), (4, 4), (8, 1)])
def test_case_15_query_head_to_kv_head_mapping(q_heads: int, kv_heads: int, tied: bool) -> None:
    """Every grouping, with head_dim 24 which is not hidden / heads."""
    shape = dataclasses.replace(SHAPE, n_q_heads=q_heads, n_kv_heads=kv_heads, tied_embedding=tied)
    assert logit_difference(LlamaConfig(shape), 70) <= 1e-5


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("kind", list(SCALINGS))
def test_rotary_scalings(kind: str, group: int) -> None:
    shape = dataclasses.replace(SHAPE, n_kv_heads=8 // group)
    config = LlamaConfig(shape, rope_theta=500.0, rope_scaling=RopeScaling(kind, SCALINGS[kind]), rms_norm_eps=1e-6)
    assert logit_difference(config, 300) <= 1e-5


@pytest.mark.parametrize("kind", list(SCALINGS))
def test_rope_at_far_positions(kind: str) -> None:
    """Absolute positions in any order, up to 100,000."""
    config = LlamaConfig(SHAPE, rope_theta=1e5, rope_scaling=RopeScaling(kind, SCALINGS[kind]))
    model = random_model(SHAPE, config=config)
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor([100_000, 0, 1, 8191])
    q, k = torch.randn(4, 8, 24, generator=generator), torch.randn(4, 2, 24, generator=generator)
    ours = model.rope(q, k, positions)
    rotary = hf_model(config, random_tensors(SHAPE, generator)).model.rotary_emb
    theirs = apply_rotary_pos_emb(q[None], k[None], *rotary(q, positions[None]), unsqueeze_dim=2)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference[0], rtol=0, atol=1e-5)


@torch.no_grad()
def test_beta_follows_its_definition() -> None:
    """beta = A * softplus(delta . v), v out of transformers' v_proj, the sum written out in Python."""
    config = LlamaConfig(SHAPE)
    model = random_model(SHAPE, seed=3)
    tensors = random_tensors(SHAPE, torch.Generator().manual_seed(3))
    hf = hf_model(config, tensors)
    values: list[torch.Tensor] = []
    hf.model.layers[0].self_attn.v_proj.register_forward_hook(lambda _m, _i, output: values.append(output[0]))
    tokens = torch.arange(6)
    _, _, _, beta = model.attention_inputs(0, model.embed(tokens))
    hf(tokens[None])
    for t in range(6):
        for h in range(2):
            weights = tensors["model.layers.0.self_attn.delta.weight"][h].tolist()
            dot = sum(w * x for w, x in zip(weights, values[0][t].tolist(), strict=True))
            expected = float(tensors["model.layers.0.self_attn.A"][h]) * math.log1p(math.exp(dot))
            assert float(beta[t, h]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@torch.no_grad()
def test_other_dtypes_agree_with_float32(dtype: str) -> None:
    tokens = torch.arange(60)
    exact = random_model(SHAPE, seed=1, dtype="float32").dense_logits(tokens)
    model = random_model(SHAPE, seed=1, dtype=dtype)
    logits = model.dense_logits(tokens)
    assert logits.dtype == model.dtype == getattr(torch, dtype)
    tolerance = {"float64": 1e-5, "float16": 0.01, "bfloat16": 0.05}[dtype]
    assert float((logits - exact).norm() / exact.norm()) < tolerance
    beta = model.attention_inputs(0, model.embed(tokens))[3]
    assert beta.dtype == (torch.float64 if dtype == "float64" else torch.float32)


@torch.no_grad()
def test_head_none_gives_no_beta() -> None:
    model = random_model(SHAPE, head="none")
    assert not model.attention_inputs(1, model.embed(torch.arange(4)))[3].any()


@pytest.mark.model
@torch.no_grad()
def test_smollm2_logits_equal_transformers(smollm2: LoadedModel) -> None:
    text = pydoc_data.topics.topics["assignment"]
    tokens = torch.tensor(smollm2.tokenizer.encode(text)[:300])
    assert len(tokens) == 300
    ours = smollm2.model.dense_logits(tokens)
    converted = open_converted(find_gguf(), "smollm2-135m")
    names = base_tensors(converted.config.shape)
    hf = hf_model(converted.config, {name: converted.tensors.take(name, shape) for name, shape in names})
    assert float((ours - hf(tokens[None]).logits[0]).abs().max()) <= 5e-4
    loss = torch.nn.functional.cross_entropy(ours[:-1], tokens[1:])
    assert math.exp(float(loss)) < 30, "a model of English should find its own language reference likely"
