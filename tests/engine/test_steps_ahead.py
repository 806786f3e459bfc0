"""Steps that are launched before the ones before them are read, as on a GPU, here on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nosa_sys.engine.cuda.auto import ScheduleChooser
from nosa_sys.engine.engine import Engine
from nosa_sys.engine.injected_guesses import with_guesses
from nosa_sys.engine.injection import synthetic_injection
from nosa_sys.engine.memory import Memory
from nosa_sys.engine.recorder import Recorder
from nosa_sys.engine.runner import StepResult
from nosa_sys.engine.sampling import SamplingParams
from nosa_sys.engine.sequence import SequenceState
from nosa_sys.errors import ConfigError, NosaError, NumericsError
from tests.engine.helpers import NAN, SMALL, VOCAB, random_tokens, tiny_model

MODEL = tiny_model(9)
DRAWN = SamplingParams(temperature=1.0, seed=3)


def ahead(**options) -> Engine:
    """An engine whose next step runs before this one is read, and whose memory is taken for whole lives."""
    engine = Engine(MODEL, SMALL, **{"runner": "kernels", "schedule": "fused_kv", "poison": NAN} | options)
    engine._runner.looks_ahead = engine._whole_life = True
    return engine


def alone(prompt: list[int], n: int, *request) -> list[int]:
    engine = Engine(MODEL, SMALL)
    engine.add(prompt, n, *request)
    return engine.run()[0]


def continued(state: SequenceState) -> list[int]:
    engine = Engine(MODEL, SMALL)
    sequence = engine.resume(state)
    return engine.run()[sequence]


def collected(engine: Engine, change: Callable[[int, StepResult], StepResult]) -> None:
    """Let ``change`` see the number and result of every collected step."""
    collect, seen = engine._runner.collect, []

    def changed() -> StepResult:
        seen.append(1)
        return change(len(seen) - 1, collect())

    engine._runner.collect = changed


@settings(max_examples=60)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(1, 110), st.integers(1, 30), st.sampled_from([0.0, 0.9]), st.integers(0, 5), st.booleans()
        ),
        min_size=1,
        max_size=5,
    ),
    operations=st.lists(st.tuples(st.sampled_from(["add", "step", "cancel", "copy"]), st.integers(1, 9)), max_size=12),
    schedule=st.sampled_from(["fused_kv", "split_merge", "two_batch", "prefetch", "auto"]),
    max_batch=st.integers(1, 4),
)
def test_whatever_is_done_between_steps(
    requests: list[tuple], operations: list[tuple[str, int]], schedule: str, max_batch: int
) -> None:
    more = {"slots": SMALL.topk + 2, "policy": "lru"} if schedule == "prefetch" else {}
    engine = ahead(schedule=schedule, max_batch=max_batch, **more)
    wanted: dict[int, list[int]] = {}
    cancelled, waiting, finished = set(), list(requests), []
    for kind, pick in [*operations, *[("add", 1), ("step", 2)] * len(requests)]:
        live = [s.id for s in (*engine._running, *engine._waiting)]
        if kind == "add" and waiting:
            prompt, new, temperature, seed, stops = waiting.pop()
            params = SamplingParams(temperature=temperature, seed=seed)
            arguments = (random_tokens(prompt, seed), new, params, range(0, VOCAB, 9) if stops else ())
            wanted[engine.add(*arguments)] = alone(*arguments)
        elif kind == "step":
            finished += [e.sequence for _ in range(pick) for e in engine.step() if e.finished]
        elif kind == "cancel" and live:
            engine.cancel(live[pick % len(live)])
            cancelled.add(live[pick % len(live)])
        elif kind == "copy" and live:
            wanted[engine.resume(engine.save(live[pick % len(live)]))] = wanted[live[pick % len(live)]]
    finished += [e.sequence for e in engine.stream() if e.finished]
    for sequence, tokens in wanted.items():
        found = engine.outputs[sequence]
        assert found == tokens or (sequence in cancelled and found == tokens[: len(found)])
        assert finished.count(sequence) == 1 or sequence in cancelled
    assert engine.memory.pool.pages_in_use == 0


@pytest.mark.parametrize("n_steps", range(1, 6))
def test_a_copy_taken_near_the_end_ends_where_the_original_does(n_steps: int) -> None:
    engine, prompt = ahead(), random_tokens(50, 1)
    sequence = engine.add(prompt, 6)
    for _ in range(n_steps):
        engine.step()
    copy = engine.resume(engine.save(sequence))
    assert engine.run()[copy] == engine.outputs[sequence] == alone(prompt, 6)


def test_rows_that_fail_in_different_steps_in_flight_all_go_back() -> None:
    """Row 0 fails in step 2, row 1 in step 3, which was launched already; each goes on from before its failure."""
    engine = ahead(max_batch=3)
    prompts = [random_tokens(n, n) for n in (120, 130, 90)]
    for prompt in prompts:
        engine.add(prompt, 20, DRAWN)
    failures = {2: {0: "bad"}, 3: {0: "worse", 1: "bad"}}
    collected(engine, lambda step, result: dataclasses.replace(result, failures=failures.get(step, {})))
    with pytest.raises(NumericsError, match="sequence 0 at position 121, step 2: bad"):
        engine.run()
    assert engine.run() == {row: alone(prompt, 20, DRAWN) for row, prompt in enumerate(prompts)}


@pytest.mark.parametrize("runner", ["eager", "kernels"])
def test_a_copy_taken_after_a_failed_step_draws_the_same_tokens(runner: str) -> None:
    engine = ahead() if runner == "kernels" else Engine(MODEL, SMALL)
    prompt = random_tokens(60, 2)
    engine.add(prompt, 20, DRAWN)
    collected(engine, lambda step, result: dataclasses.replace(result, failures={0: "bad"} if step == 4 else {}))
    with pytest.raises(NumericsError):
        engine.run()
    assert continued(engine.save(0)) == alone(prompt, 20, DRAWN)


@pytest.mark.parametrize("place", ["_plan", "collect"])
def test_what_an_interrupted_wait_leaves_can_be_saved(place: str) -> None:
    """Whether the step in flight or its tokens are lost: what is saved goes on as if nothing had happened."""
    engine, prompt = ahead(), random_tokens(94, 2)
    engine.add(prompt, 20, DRAWN)
    for _ in range(3):
        engine.step()
    work = getattr(engine._runner, place)

    def interrupted(*arguments: object) -> None:
        work(*arguments)
        raise KeyboardInterrupt

    setattr(engine._runner, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    setattr(engine._runner, place, work)
    with pytest.raises(NosaError, match="half-way"):
        engine.step()
    assert continued(engine.save(0)) == alone(prompt, 20, DRAWN)


def test_a_full_disk_while_steps_are_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder's error comes out of whatever needs the step; the sequence can still be saved."""
    recorder, prompt = Recorder(tmp_path), random_tokens(94, 2)
    engine = ahead(recorder=recorder)
    engine.add(prompt, 20, DRAWN)
    engine.step()

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder, "on_step", full)
    with pytest.raises(OSError, match="No space"):
        engine.save(0)
    with pytest.raises(NosaError, match="half-way"):
        engine.step()
    assert continued(engine.save(0)) == alone(prompt, 20, DRAWN)


def sets(contexts: list[int], n_steps: int):
    shape = MODEL.shape
    return synthetic_injection(SMALL, "nosa", shape.n_layers, shape.n_kv_heads, contexts, n_steps, 1.0)


def test_every_injected_step_gives_its_tokens_before_the_end_is_met() -> None:
    engine = ahead(max_batch=2, injection=sets([120, 90], 6))
    engine.fill_synthetic([120, 90], max_new_tokens=50)
    for _ in range(6):
        assert len(engine.step()) == 2
    with pytest.raises(ConfigError, match="past the 6 injected steps"):
        engine.step()


@pytest.mark.parametrize("runner", ["eager", "kernels"])
def test_injected_sets_are_for_their_model_budget_and_positions(runner: str) -> None:
    injection = sets([120, 90], 6)
    engine = Engine(MODEL, SMALL, max_batch=2, runner=runner, injection=injection)
    engine.fill_synthetic([120, 40])
    with pytest.raises(ConfigError, match="row 1 is at position 39 in step 0"):
        engine.step()
    for sparse in (SMALL.with_topk(6), SMALL.with_topk(4)):
        with pytest.raises(ConfigError, match="do not fit"):
            Engine(MODEL, sparse, max_batch=2, runner=runner, injection=injection)


def test_prefetch_of_injected_sets_needs_guesses_of_its_size() -> None:
    injection = sets([120, 90], 6)
    options = {"runner": "kernels", "schedule": "prefetch", "slots": 8, "policy": "lru", "max_batch": 2}
    for wrong in (injection, with_guesses(injection, SMALL, 2, 0.5)):
        with pytest.raises(ConfigError, match="topk \\+ n_prefetch = 8"):
            Engine(MODEL, SMALL, injection=wrong, **options)
    Engine(MODEL, SMALL, injection=with_guesses(injection, SMALL, 3, 0.5), **options)


def test_trials_of_steps_that_run_ahead_end_and_follow_the_batch() -> None:
    """The times of a step are told after the next one was asked for. 18 steps of trial, and the fastest from then on,
    for the batch size after that too."""
    chooser, ran = ScheduleChooser(("a", "b", "c")), []
    times = {4: {"a": 3.0, "b": 1.0, "c": 2.0}, 5: {"a": 3.0, "b": 2.0, "c": 1.0}}
    for n_rows in [4] * 60 + [5] * 60:
        ran.append((chooser.next(n_rows), n_rows))
        if len(ran) > 1:
            name, size = ran[-2]
            chooser.tell(name, size, times[size][name])
    names = [name for name, _ in ran]
    assert names[:18] == names[60:78] == [n for n in "abc" for _ in range(6)]
    assert set(names[20:60]) == {"b"}
    assert set(names[80:]) == {"c"}


def test_a_trial_outlasts_joins_and_leaves() -> None:
    """The batch changes size at every step or two, as when sequences join and leave all the time: each size runs its 18
    trial steps once, and its own fastest after them."""
    chooser, ran = ScheduleChooser(("a", "b", "c")), {3: [], 4: [], 5: []}
    times = {3: {"a": 1, "b": 2, "c": 3}, 4: {"a": 3, "b": 1, "c": 2}, 5: {"a": 3, "b": 2, "c": 1}}
    told = []
    for step in range(300):
        size = (3, 4, 4, 5, 3, 5)[step % 6]
        name = chooser.next(size)
        ran[size].append(name)
        told.append((name, size))
        if step:
            chooser.tell(*told[-2], times[told[-2][1]][told[-2][0]])
    for size, fastest in ((3, "a"), (4, "b"), (5, "c")):
        assert ran[size][:18] == [n for n in "abc" for _ in range(6)]
        assert set(ran[size][20:]) == {fastest}


def test_batches_of_about_one_size_share_a_trial() -> None:
    chooser, times = ScheduleChooser(("a", "b")), {"a": 2.0, "b": 1.0}
    ran = []
    for step in range(60):
        size = 57 + step % 8  # 57 .. 64
        ran.append(chooser.next(size))
        chooser.tell(ran[-1], size, times[ran[-1]])
    assert ran[:12] == ["a"] * 6 + ["b"] * 6
    assert set(ran[12:]) == {"b"}
    assert chooser.next(40) == "a"  # another class


def test_auto_finishes_its_trial_while_sequences_join_and_leave() -> None:
    """One sequence joins every other step and leaves three steps later."""
    engine = ahead(schedule="auto", max_batch=3)
    engine.add(random_tokens(90, 0), 150)
    used, launch = [], engine._runner.launch

    def noted(rows, *arguments) -> None:
        launch(rows, *arguments)
        used.append((rows.size, engine._runner._in_flight[-1].schedule))

    engine._runner.launch = noted
    for step in range(140):
        if step % 2 == 0:
            engine.add(random_tokens(20, step), 3)
        engine.step()
    for size in {size for size, _ in used}:
        own = [name for n, name in used if n == size]
        if len(own) > 20:
            assert len(set(own[20:])) == 1
    assert max(len([1 for n, _ in used if n == size]) for size in (2, 3)) > 40


def test_copies_of_an_interrupted_prefill_arrive_before_its_pages_are_given_on(monkeypatch) -> None:
    engine, order = ahead(), []
    settle, release = Memory.settle, engine.memory.pool.release
    monkeypatch.setattr(Memory, "settle", lambda self: (order.append("settled"), settle(self))[1])
    monkeypatch.setattr(engine.memory.pool, "release", lambda pages: (order.append("released"), release(pages))[1])

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Memory, "store_chunk", interrupted)
    engine.add(random_tokens(50, 1), 3)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert order[-2:] == ["settled", "released"]


def test_a_batch_without_bound_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="max_batch=1000000000 exceeds the limit of 65536"):
        Engine(MODEL, SMALL, max_batch=10**9)
