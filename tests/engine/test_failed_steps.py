"""Steps that fail or are stopped half-way: nothing wrong may come out of what runs on afterwards."""

from __future__ import annotations

import math

import pytest
import torch

from nosa_sys.engine import decode
from nosa_sys.engine.engine import Engine
from nosa_sys.engine.memory import Memory
from nosa_sys.engine.sampling import SamplingParams
from nosa_sys.errors import ConfigError, NosaError, NumericsError
from nosa_sys.models.llama import LlamaModel
from tests.engine.helpers import SMALL, random_tokens, tiny_model

BAD_TOKEN = 7
PROMPT = [t if t != BAD_TOKEN else 8 for t in random_tokens(110, 1)]


def model_with_a_bad_token() -> LlamaModel:
    """Its embedding of BAD_TOKEN is NaN; the lm_head never proposes it."""
    model = tiny_model(5)
    model.embedding = model.embedding.clone()
    model.embedding[BAD_TOKEN] = math.nan
    model.lm_head = model.lm_head.clone()
    model.lm_head[BAD_TOKEN] = 0.0
    return model


def alone(model: LlamaModel, n_tokens: int) -> list[int]:
    engine = Engine(model, SMALL)
    engine.add(PROMPT, n_tokens)
    return engine.run()[0]


def test_a_prompt_whose_prefill_fails_never_decodes() -> None:
    """The error names the sequence and comes again until it is cancelled; the others are as if it had never been."""
    model = model_with_a_bad_token()
    engine = Engine(model, SMALL, poison=math.nan)
    good = engine.add(PROMPT, 12)
    engine.step()
    bad = engine.add([1, 2, 3, BAD_TOKEN, *[1] * 150], 5)
    for _ in range(3):
        with pytest.raises(NumericsError, match=f"sequence {bad}"):
            engine.step()
    assert engine.outputs[bad] == []
    engine.cancel(bad)
    assert engine.run()[good] == alone(model, 12)
    assert engine.memory.pool.pages_in_use == 0


def test_an_interrupted_prefill_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, store = tiny_model(5), Memory.store_chunk
    calls = []

    def interrupted(*arguments: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        store(*arguments)

    monkeypatch.setattr(Memory, "store_chunk", interrupted)
    engine = Engine(model, SMALL, prefill_chunk=40, poison=math.nan)
    engine.add(PROMPT, 12)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert engine.run()[0] == alone(model, 12)


def test_pages_stay_in_order_when_a_step_is_tried_again() -> None:
    """The failing step fills a block: its page is taken once, and what is saved afterwards is not shifted."""
    model = model_with_a_bad_token()
    engine = Engine(model, SMALL)
    good = engine.add(PROMPT[:96], 40)
    bad = engine.add([1, BAD_TOKEN], 5)
    for _ in range(3):
        with pytest.raises(NumericsError, match=f"sequence {bad}"):
            engine.step()
    assert engine.memory.pool.pages_in_use == 96 // 16
    engine.cancel(bad)
    for _ in range(20):
        engine.step()
    other = Engine(model, SMALL)
    resumed = other.resume(engine.save(good))
    assert other.run()[resumed] == engine.run()[good]


def test_an_engine_stopped_half_way_through_a_step_refuses_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block map already names a block that never arrived. What was saved goes on elsewhere, unharmed."""
    model, fetch = tiny_model(5), decode.fetch_blocks
    engine = Engine(model, SMALL, poison=math.nan)
    sequence = engine.add(PROMPT, 30)
    for _ in range(5):
        engine.step()

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(decode, "fetch_blocks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    monkeypatch.setattr(decode, "fetch_blocks", fetch)
    with pytest.raises(NosaError, match="half-way"):
        engine.step()
    other = Engine(model, SMALL)
    resumed = other.resume(engine.save(sequence))
    assert other.run()[resumed] == alone(model, 30)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("runner", ["eager", "kernels"])
def test_logits_without_an_order_are_refused(value: float, temperature: float, runner: str) -> None:
    model = tiny_model(5)
    model.final_norm = torch.full_like(model.final_norm, value)
    engine = Engine(model, SMALL, runner=runner)
    engine.add([1, 2], 5, sampling=SamplingParams(temperature=temperature))
    with pytest.raises(NumericsError, match="sequence 0 at position 1"):
        engine.step()


@pytest.mark.parametrize("tokens", [[1.0], ["a"], [None]])
def test_tokens_that_are_no_whole_numbers(tokens: list) -> None:
    engine = Engine(tiny_model(), SMALL)
    with pytest.raises(ConfigError, match="whole numbers"):
        engine.add(tokens, 2)
    with pytest.raises(ConfigError, match="whole numbers"):
        engine.add([1], 2, force_tokens=tokens)
