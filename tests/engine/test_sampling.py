"""Sampling: greedy, temperature and top-p against a plain reading of the definition; seeds; EOS; forced tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys.engine.engine import Engine
from nosa_sys.engine.sampling import SamplingParams, draw_rows, sample
from nosa_sys.engine.sequence import TokenEvent
from nosa_sys.errors import ConfigError
from tests.engine.helpers import SMALL, random_tokens, tiny_model


def plain_draw(logits: list[float], temperature: float, top_p: float, uniform: float) -> int:
    """Inverse CDF over the nucleus, by a loop."""
    weights = np.exp((np.array(logits) - max(logits)) / temperature)
    probabilities = weights / weights.sum()
    order = sorted(range(len(logits)), key=lambda i: (-probabilities[i], i))
    nucleus, mass = [], 0.0
    for i in order:
        nucleus.append(i)
        mass += probabilities[i]
        if mass >= top_p:
            break
    target, running = uniform * mass, 0.0
    for i in nucleus:
        running += probabilities[i]
        if running > target:
            return i
    return nucleus[-1]


@given(seed=st.integers(0, 1000), temperature=st.floats(0.1, 3), top_p=st.floats(0.05, 1), rows=st.integers(1, 4))
def test_draws_equal_a_plain_loop(seed: int, temperature: float, top_p: float, rows: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, (rows, 30))
    params = [SamplingParams(temperature, top_p, seed + r) for r in range(rows)]
    drawn = sample(torch.tensor(logits), draw_rows(params, [p.generator().random for p in params]))
    uniforms = [np.random.Generator(np.random.PCG64(seed + r)).random() for r in range(rows)]
    expected = [plain_draw(list(logits[r]), temperature, top_p, uniforms[r]) for r in range(rows)]
    assert drawn == expected


def run_one(engine: Engine, *request) -> list[int]:
    sequence = engine.add(*request)
    return engine.run()[sequence]


def test_frequencies_follow_the_softmax() -> None:
    params = SamplingParams(temperature=1.0, seed=3)
    generator, logits = params.generator(), torch.tensor([[0.0, 1.0, 2.0]])
    counts = np.bincount([sample(logits, draw_rows([params], [generator.random]))[0] for _ in range(4000)], minlength=3)
    expected = np.exp([0.0, 1.0, 2.0]) / np.exp([0.0, 1.0, 2.0]).sum()
    np.testing.assert_allclose(counts / 4000, expected, atol=0.03)


def test_seeded_sampling_does_not_depend_on_the_batch() -> None:
    model = tiny_model()
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=5)
    alone = Engine(model, SMALL)
    solo = run_one(alone, random_tokens(40, 0), 30, params)
    engine = Engine(model, SMALL)
    engine.add(random_tokens(90, 1), 20, SamplingParams(temperature=2.0, seed=6))
    engine.step()
    engine.add(random_tokens(7, 2), 40)
    mixed = engine.add(random_tokens(40, 0), 30, params)
    assert engine.run()[mixed] == solo
    assert len(set(solo)) > 5
    other = Engine(model, SMALL)
    assert run_one(other, random_tokens(40, 0), 30, SamplingParams(1.0, 0.9, 6)) != solo


def test_sampling_goes_on_after_resume() -> None:
    model, params = tiny_model(), SamplingParams(temperature=1.0, seed=5)
    engine = Engine(model, SMALL)
    sequence = engine.add(random_tokens(40, 0), 30, params)
    for _ in range(11):
        engine.step()
    resumed = engine.resume(engine.save(sequence))
    outputs = engine.run()
    assert outputs[resumed] == outputs[sequence]


def test_eos_and_forced_tokens() -> None:
    """EOS ends a sequence where the model says it; forced tokens are taken as they are, EOS among them."""
    model, prompt = tiny_model(), random_tokens(20, 0)
    engine = Engine(model, SMALL)
    free = run_one(engine, prompt, 12)
    eos = free[6]
    stop = free.index(eos)
    engine = Engine(model, SMALL)
    sequence = engine.add(prompt, 12, eos_ids=[eos])
    events = list(engine.stream())
    assert [e.token for e in events] == free[: stop + 1]
    assert events[-1] == TokenEvent(sequence, eos, 20 + stop, True, "eos")
    engine = Engine(model, SMALL)
    sequence = engine.add(prompt, 4, eos_ids=[eos], force_tokens=[eos, eos, 3])
    assert engine.run()[sequence][:3] == [eos, eos, 3]
    assert len(engine.outputs[sequence]) == 4


@pytest.mark.parametrize(
    ("bad", "named"),
    [({"temperature": -1.0}, "temperature=-1"), ({"temperature": float("nan")}, "nan"), ({"top_p": 0.0}, "top_p=0"),
     ({"top_p": 1.5}, "top_p=1.5"), ({"seed": -1}, "seed=-1")],
)  # fmt: skip
def test_bad_sampling_values_are_named(bad: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SamplingParams(**bad)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(([], 3), "prompt is empty"), (([1, 64], 3), "token 64"), (([1], 0), "max_new_tokens=0"), (([-1], 3), "token -1")],
)
def test_bad_requests_are_named(arguments: tuple, named: str) -> None:
    engine = Engine(tiny_model(), SMALL)
    with pytest.raises(ConfigError, match=named):
        engine.add(*arguments)
    with pytest.raises(ConfigError, match="sequence 7 is neither"):
        engine.cancel(7)


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-20])
def test_a_tiny_temperature_picks_the_best_token(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    logits = torch.tensor([[-1e300, 3e300, 2e300, -5e-300]], dtype=torch.float64)
    assert sample(logits, draw_rows([params], [params.generator().random])) == [1]
