"""The fused step (the launches that a CUDA graph holds) against the eager engine, on a CPU."""

from __future__ import annotations

import numpy as np
import pytest

from nosa_sys.engine.cuda.auto import ScheduleChooser
from nosa_sys.engine.engine import Engine
from nosa_sys.engine.sampling import SamplingParams
from nosa_sys.errors import ConfigError, NumericsError
from tests.engine.helpers import METHODS, NAN, SMALL, Watch, random_tokens, tiny_model

SCHEDULES = ("serial", "fused_kv", "split_merge", "two_batch", "prefetch")
# (prompt tokens, new tokens): unequal, over block and window edges, shorter and longer than the budget
REQUESTS = ((150, 40), (1, 30), (33, 60), (81, 25), (200, 12), (16, 50))


def watched(model, **options) -> tuple[dict, Engine]:
    """Rows of every sequence; three lanes, so that sequences wait, join and leave."""
    engine = Engine(model, SMALL, max_batch=3, poison=NAN, **options)
    for seed, (prompt, new) in enumerate(REQUESTS):
        engine.add(random_tokens(prompt, seed), new, sampling=SamplingParams(temperature=0.7 * (seed % 2), seed=seed))
    return Watch(engine).run(), engine


def fused(model, schedule: str, **options) -> tuple[dict, Engine]:
    if schedule == "prefetch":
        options = {"slots": 8, "policy": "lru"} | options
    return watched(model, runner="kernels", inspect=True, schedule=schedule, **options)


def assert_same(found: dict, expected: dict, *, misses: bool) -> None:
    assert found.keys() == expected.keys()
    for sequence, rows in expected.items():
        assert [r.position for r in found[sequence]] == [r.position for r in rows]
        for mine, theirs in zip(found[sequence], rows, strict=True):
            assert mine.selected == theirs.selected
            assert np.abs(mine.logits - theirs.logits).max() <= 1e-9
            assert not misses or mine.misses == theirs.misses


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_and_method_as_the_eager_engine(schedule: str, method: str) -> None:
    if schedule == "prefetch" and method == "full":
        pytest.skip("nothing to fetch ahead where all KV stays on the device")
    model = tiny_model(3)
    expected, eager = watched(model, method=method)
    found, engine = fused(model, schedule, method=method)
    assert engine.outputs == eager.outputs
    assert_same(found, expected, misses=schedule != "prefetch")


@pytest.mark.parametrize("schedule", ["serial", "split_merge", "two_batch"])
@pytest.mark.parametrize("policy", ["lru", "beta"])
def test_hot_buffers_keep_the_same_blocks(schedule: str, policy: str) -> None:
    model = tiny_model(4)
    expected, eager = watched(model, slots=7, policy=policy)
    found, engine = fused(model, schedule, slots=7, policy=policy)
    assert engine.outputs == eager.outputs
    assert_same(found, expected, misses=True)


@pytest.mark.parametrize("method", ["nosa", "infllmv2", "dma"])
def test_kv_that_stays_on_the_device(method: str) -> None:
    model = tiny_model(5)
    expected, eager = watched(model, method=method)
    found, engine = fused(model, "serial", method=method, offload=False)
    assert engine.outputs == eager.outputs
    assert_same(found, expected, misses=False)
    assert engine.summary()["h2d_bytes"] == 0


def test_filled_blocks_reach_the_pool_whole() -> None:
    """What is saved from the fused engine continues in an eager one, and the other way round."""
    model = tiny_model(6)
    unbroken = Engine(model, SMALL)
    unbroken.add(random_tokens(50, 1), 90)
    tokens = unbroken.run()[0]
    for first, second in (("kernels", "eager"), ("eager", "kernels")):
        engine = Engine(model, SMALL, runner=first, poison=NAN)
        engine.add(random_tokens(50, 1), 90)
        for _ in range(41):
            engine.step()
        other = Engine(model, SMALL, runner=second, poison=NAN)
        resumed = other.resume(engine.save(0))
        assert other.run()[resumed] == tokens


def test_guesses_are_counted_apart_from_misses() -> None:
    model = tiny_model(3)
    _, plain = fused(model, "fused_kv", slots=8, policy="lru")
    engine = Engine(model, SMALL, runner="kernels", schedule="prefetch", slots=8, policy="lru")
    engine.add(random_tokens(200, 1), 60)
    brought = wasted = 0
    while not engine.idle:
        engine.step()
        brought += int(engine.last_plan.prefetch_loads.sum())
        wasted += int(engine.last_plan.wasted_loads.sum())
    assert 0 < wasted <= brought
    assert plain.last_plan.prefetch_loads is None


def test_each_half_of_a_timed_batch_shows_its_own_copies() -> None:
    """Three lanes: the first half is lane 0 alone."""
    engine = Engine(tiny_model(3), SMALL, runner="kernels", schedule="two_batch", timed=True, max_batch=3)
    for seed in range(3):
        engine.add(random_tokens(150 + 40 * seed, seed), 40)
    uneven = 0
    while not engine.idle:
        engine.step()
        misses = engine.last_plan.n_misses.sum(axis=2)
        copies = [span for span in engine._runner.last_spans if span[1] == "copy"]
        halves = [misses[:, :1].sum(axis=1), misses[:, 1:].sum(axis=1)]
        assert [span[5] for span in copies] == (np.concatenate(halves) * engine.memory.block_bytes).tolist()
        uneven += int((misses[:, 1] > 0).any())
    assert uneven > 5


def test_a_nan_score_names_layer_head_and_sequence_and_the_others_go_on() -> None:
    model = tiny_model(7)
    alone = Engine(model, SMALL)
    alone.add(random_tokens(120, 1), 20)
    expected = alone.run()[0]
    engine = Engine(model, SMALL, runner="kernels", max_batch=2)
    good, bad = engine.add(random_tokens(120, 1), 20), engine.add(random_tokens(130, 2), 20)
    engine.step()
    engine.memory.context.beta_means[1][1, 1, 3] = NAN
    with pytest.raises(NumericsError, match=f"sequence {bad} .* beta of layer 1, KV head 1"):
        engine.step()
    engine.cancel(bad)
    engine.run()
    assert engine.outputs[good] == expected


def test_auto_tries_the_schedules_and_keeps_the_fastest() -> None:
    chooser = ScheduleChooser(("a", "b", "c"))
    times = {"a": 3.0, "b": 1.0, "c": 2.0}
    ran = []
    for _ in range(40):
        ran.append(chooser.next(4))
        chooser.tell(ran[-1], 4, times[ran[-1]])
    assert set(ran[:18]) == {"a", "b", "c"}
    assert set(ran[18:]) == {"b"}
    assert chooser.next(5) == "a"  # another batch is another question
    model = tiny_model(3)
    expected, eager = watched(model)
    found, engine = fused(model, "auto")
    assert engine.outputs == eager.outputs
    assert_same(found, expected, misses=True)


def test_refusals() -> None:
    model = tiny_model()
    for options, message in (
        ({"runner": "graph"}, "CUDA"),
        ({"runner": "warp"}, "unknown runner"),
        ({"runner": "kernels", "schedule": "prefetch"}, "spare slots"),
        ({"runner": "kernels", "schedule": "later"}, "unknown schedule"),
        ({"runner": "kernels", "fetch_only": True}, "injected"),
        ({"timed": True}, "eager runner has no timed"),
        ({"runner": "kernels", "method": "full", "record_scores": True}, "use runner='eager'"),
        ({"offload": False, "slots": 9}, "leave slots out"),
    ):
        with pytest.raises(ConfigError, match=message):
            Engine(model, SMALL, **options)
