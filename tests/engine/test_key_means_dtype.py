"""Compressed keys in the model's type: selections against an oracle that rounds the means, bytes, saving, refusals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from nosa_sys.engine.engine import Engine
from nosa_sys.errors import ConfigError
from tests.engine.helpers import NAN, SMALL, Watch, random_tokens, tiny_model
from tests.engine.oracle import choose

REQUESTS = ((110, 20), (90, 30), (16, 90))  # two lanes; the third waits and turns sparse after its 80th token


def bf16(mean: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.float32(mean)).bfloat16().double().numpy()


def watched(dtype: str, means: str, **options) -> tuple[Engine, dict]:
    model = tiny_model(3, dtype=dtype)
    engine = Engine(model, SMALL, key_means_dtype=means, poison=NAN, max_batch=2, **options)
    for seed, (prompt, new) in enumerate(REQUESTS):
        engine.add(random_tokens(prompt, seed), new)
    return engine, Watch(engine).run()


class Queries:
    """Roped queries of the eager engine's decode steps, [layer][row], as its model makes them."""

    def __init__(self, engine: Engine) -> None:
        self.of_step: list[np.ndarray] = []
        rope = engine.model.rope

        def seen(q, k, positions):
            q, k = rope(q, k, positions)
            self.of_step.append(q.double().numpy())
            return q, k

        engine.model.rope = seen  # type: ignore[method-assign]


def chosen(engine: Engine, queries: list[np.ndarray], stored: Callable) -> list[list[list[int]]]:
    """The oracle's choice [layer][head] of lane 0's last query, from the keys and betas that the engine holds."""
    memory, sequence = engine.memory, engine._running[0]
    n = sequence.n_cached
    found = []
    for layer, q in enumerate(queries):
        k = memory.read_context(layer, 0, sequence.pages, n)[0].double().numpy()
        beta = memory.context.token_betas[layer][0].flatten(1)[:, :n].double().numpy()
        group = q.shape[1] // len(k)
        heads = range(len(k))
        found.append(
            [choose(q[0, h * group : (h + 1) * group], k[h], beta[h], SMALL, "nosa", stored)[0] for h in heads]
        )
    return found


@pytest.mark.parametrize("means", ["float32", "model"])
def test_bf16_selections_follow_the_means_as_they_are_kept(means: str) -> None:
    """With rounded means the oracle that rounds agrees in every step, and the one that does not differs somewhere."""
    engine = Engine(tiny_model(4, dtype="bfloat16"), SMALL, key_means_dtype=means, inspect=True, poison=NAN)
    engine.add(random_tokens(70, 1), 400)
    engine.step()
    queries, wrong = Queries(engine), {"rounded": 0, "exact": 0}
    for _ in range(180):
        queries.of_step = []
        engine.step()
        ids = engine.last_plan.block_ids[:, 0].tolist()
        mine = [[[j for j in head if j >= 0] for head in layer] for layer in ids]
        for name, stored in (("rounded", bf16), ("exact", np.asarray)):
            wrong[name] += mine != chosen(engine, queries.of_step, stored)
    right, other = ("rounded", "exact") if means == "model" else ("exact", "rounded")
    assert wrong[right] == 0
    assert wrong[other] > 0


@pytest.mark.parametrize("schedule", ["serial", "split_merge", "two_batch"])
def test_the_fused_step_keeps_the_same_means(schedule: str) -> None:
    """Layer 0 reads embeddings alone, so that its keys are the same to a last bit of bf16 in both."""
    kept = []
    for options in ({}, {"runner": "kernels", "schedule": schedule}):
        engine = Engine(tiny_model(3, dtype="bfloat16"), SMALL, key_means_dtype="model", max_batch=2, **options)
        for seed in (1, 2):
            text = random_tokens(120, seed)
            engine.add(text[:50], 70, force_tokens=text[50:])
        for _ in range(30):
            engine.step()
        means = engine.memory.context.key_means
        assert {layer.dtype for layer in means} == {torch.bfloat16}
        kept.append(means[0][:2, :, : SMALL.n_windows(79)].float())
        assert engine.memory.context.beta_means[0].dtype == engine.memory.context.token_betas[0].dtype == torch.float32
    assert torch.allclose(*kept, rtol=0, atol=2**-7 * float(kept[0].abs().max()))


@pytest.mark.parametrize("options", [{"inspect": True}, {"inspect": True, "runner": "kernels", "schedule": "fused_kv"}])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nothing_changes_where_the_model_is_as_wide_as_the_means(dtype: str, options: dict) -> None:
    (default, expected), (engine, found) = (watched(dtype, means, **options) for means in ("float32", "model"))
    assert engine.outputs == default.outputs
    assert engine.memory.allocated_bytes() == default.memory.allocated_bytes()
    for sequence, rows in expected.items():
        for mine, theirs in zip(found[sequence], rows, strict=True):
            assert mine.selected == theirs.selected
            assert np.array_equal(mine.logits, theirs.logits)


def test_bytes_of_the_means_are_half() -> None:
    (wide, _), (narrow, _) = (watched("bfloat16", means, inspect=True) for means in ("float32", "model"))

    def means(engine: Engine) -> int:
        return sum(t.numel() * t.element_size() for t in engine.memory.context.key_means)

    assert means(wide) == 2 * means(narrow) > 0
    saved = wide.summary()["device_context_bytes"] - narrow.summary()["device_context_bytes"]  # type: ignore[operator]
    assert saved == means(narrow)
    assert (wide.summary()["key_means_dtype"], narrow.summary()["key_means_dtype"]) == ("float32", "bfloat16")


def test_a_saved_sequence_goes_on_bit_for_bit_with_equal_means_alone() -> None:
    model = tiny_model(3, dtype="bfloat16")
    unbroken = Engine(model, SMALL, key_means_dtype="model")
    unbroken.add(random_tokens(100, 1), 60)
    tokens = unbroken.run()[0]
    engine = Engine(model, SMALL, key_means_dtype="model")
    engine.add(random_tokens(100, 1), 60)
    for _ in range(23):
        engine.step()
    state = engine.save(0)
    other = Engine(model, SMALL, key_means_dtype="model")
    resumed = other.resume(state)
    assert other.run()[resumed] == tokens
    with pytest.raises(ConfigError, match="key_means_dtype=bfloat16, this engine float32"):
        Engine(model, SMALL).resume(state)


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="key_means_dtype='bfloat16' must be one of float32, model"):
        Engine(tiny_model(), SMALL, key_means_dtype="bfloat16")
