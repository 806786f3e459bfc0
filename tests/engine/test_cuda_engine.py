"""The engine on a GPU: captured steps against the CPU engine, stream order, joins and leaves, what a trace records."""

from __future__ import annotations

import math

import pytest
import torch

from nosa_sys.engine.cuda.streams import Streams
from nosa_sys.engine.engine import Engine
from nosa_sys.engine.recorder import Recorder
from nosa_sys.engine.sampling import SamplingParams
from nosa_sys.errors import NumericsError
from nosa_sys.experiments.engine_check import SMALL, SMALL_SHAPE, move_weights
from nosa_sys.models.llama import LlamaModel
from nosa_sys.models.random import random_model
from nosa_sys.traces.check import check_trace
from nosa_sys.traces.reader import Trace
from tests.engine.helpers import NAN, random_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def models() -> tuple[LlamaModel, LlamaModel]:
    """The same weights on the CPU and on the GPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    cpu = random_model(SMALL_SHAPE, 5)
    gpu = random_model(SMALL_SHAPE, 5, device="cuda")
    move_weights(cpu, gpu)
    return cpu, gpu


def decoded(model: LlamaModel, requests: list[tuple[int, int]], batch: int, **options) -> tuple[dict, Engine]:
    engine = Engine(model, SMALL, max_batch=batch, poison=NAN, **options)
    for seed, (prompt, new) in enumerate(requests):
        engine.add(random_tokens(prompt, seed), new)
    return engine.run(), engine


def test_case_04_replays_do_what_eager_mode_does(models) -> None:
    """128 + 400 tokens over six block edges, and three rows in a graph of four lanes, the second one empty: tokens and
    stored KV equal."""
    cpu, gpu = models
    expected, _ = decoded(cpu, [(128, 400)], 1)
    found, _ = decoded(gpu, [(128, 400)], 1)
    assert found == expected
    requests = [(128, 205), (90, 3), (600, 205), (64, 205)]
    found = {}
    for runner in ("graph", "kernels"):
        engine = Engine(gpu, SMALL, max_batch=4, poison=NAN, runner=runner, schedule="split_merge")
        for seed, (prompt, new) in enumerate(requests):
            engine.add(random_tokens(prompt, seed), new)
        for _ in range(200):
            engine.step()
        found[runner] = [(engine.save(key), list(engine.outputs[key])) for key in (0, 2, 3)]
    for (mine, tokens), (theirs, expected) in zip(found["graph"], found["kernels"], strict=True):
        n_tokens = min(len(tokens), len(expected))
        assert n_tokens >= 200
        assert tokens[:n_tokens] == expected[:n_tokens]
        for replayed, launched in zip(mine.kv.blocks, theirs.kv.blocks, strict=True):
            n_blocks = min(len(replayed), len(launched))
            assert n_blocks >= theirs.kv.n_tokens // SMALL.block_size
            torch.testing.assert_close(replayed[:n_blocks], launched[:n_blocks], rtol=0, atol=1e-3)


@pytest.mark.parametrize("schedule", ["split_merge", "two_batch", "prefetch"])
def test_case_09_copies_are_ordered_with_compute(models, schedule: str) -> None:
    """64 sequences, steps run ahead of the host: equal to a run that waits for the device after every step."""
    _, gpu = models
    more = {"slots": SMALL.topk + 4, "policy": "lru"} if schedule == "prefetch" else {}
    requests = [(500 + 37 * i % 300, 60) for i in range(64)]
    expected, _ = decoded(gpu, requests, 64, runner="kernels", schedule="serial")
    found, _ = decoded(gpu, requests, 64, schedule=schedule, **more)
    assert found == expected


def test_case_09_without_the_waits_the_result_is_wrong(models, monkeypatch: pytest.MonkeyPatch) -> None:
    _, gpu = models
    requests = [(900, 40)] * 48
    expected, _ = decoded(gpu, requests, 48, runner="kernels", schedule="serial", method="infllmv2")
    join, spin = Streams.join, torch.cuda._sleep
    side = Streams._side

    def late(self, stream, after):  # copies start late, and nobody waits for them but the end of the step
        context = side(self, stream, after)
        spin_inside = stream is self._h2d

        class Late:
            def __enter__(self) -> None:
                context.__enter__()
                if spin_inside:
                    spin(400_000)

            def __exit__(self, *error: object) -> None:
                context.__exit__(*error)

        return Late()

    monkeypatch.setattr(Streams, "_side", late)
    ordered, _ = decoded(gpu, requests, 48, schedule="split_merge", method="infllmv2")
    assert ordered == expected
    waits = Streams.wait
    monkeypatch.setattr(
        Streams, "wait", lambda self, mark: waits(self, mark) if torch.cuda.current_stream() in self._forked else None
    )
    monkeypatch.setattr(Streams, "join", join)
    try:
        wrong, _ = decoded(gpu, requests, 48, schedule="split_merge", method="infllmv2")
    except NumericsError:
        return  # poison was read
    assert wrong != expected


def test_case_16_a_hundred_joins_and_leaves(models) -> None:
    cpu, gpu = models
    requests = [(80 + 61 * i % 700, 3 + i % 5) for i in range(100)]
    expected, _ = decoded(cpu, requests, 4)
    found, engine = decoded(gpu, requests, 4)
    assert found == expected
    assert engine.memory.pool.pages_in_use == 0


def test_drawn_tokens_are_those_of_the_cpu(models) -> None:
    outputs = []
    for model in models:
        engine = Engine(model, SMALL, max_batch=3)
        for seed in range(5):
            engine.add(random_tokens(300, seed), 40, sampling=SamplingParams(temperature=0.9, top_p=0.8, seed=seed))
        outputs.append(engine.run())
    assert outputs[0] == outputs[1]


def test_a_nan_score_stops_its_own_row_alone(models) -> None:
    _, gpu = models
    alone, _ = decoded(gpu, [(700, 30)], 1)
    engine = Engine(gpu, SMALL, max_batch=2)
    good, bad = engine.add(random_tokens(700, 0), 30), engine.add(random_tokens(800, 1), 30)
    engine.step()
    engine.save(good)
    engine.memory.context.beta_means[1][1, 1, 8] = math.nan
    with pytest.raises(NumericsError, match=f"sequence {bad} .* beta of layer 1, KV head 1"):
        engine.run()
    engine.cancel(bad)
    engine.run()
    assert engine.outputs[good] == alone[0]


@pytest.mark.parametrize("method", ["nosa", "infllmv2", "full"])
def test_a_recorded_run_passes_the_check_and_gives_the_same_tokens(models, method: str, tmp_path) -> None:
    cpu, gpu = models
    requests = [(700, 40), (300, 60), (900, 20), (33, 50)]
    plain, _ = decoded(cpu, requests, 2, method=method)
    with Recorder(tmp_path / "trace", background=True) as recorder:
        found, _ = decoded(gpu, requests, 2, method=method, recorder=recorder, record_scores=method != "full")
    assert found == plain
    report = check_trace(Trace.open(tmp_path / "trace"))
    assert report.ok, report.problems[:3]


def test_a_timed_run_writes_phases_and_a_timeline(models, tmp_path) -> None:
    _, gpu = models
    with Recorder(tmp_path / "trace") as recorder:
        _, engine = decoded(gpu, [(900, 20)] * 4, 4, recorder=recorder, timed=True, schedule="two_batch")
    assert engine.last_plan.phase_us["select_us"].min() > 0
    assert engine.last_plan.phase_us["attention_us"].min() > 0
    assert (tmp_path / "trace" / "timeline.json.gz").stat().st_size > 100


@pytest.mark.parametrize("method", ["nosa", "full"])
def test_longer_sequences_that_join_are_seldom_captured_anew(models, method: str) -> None:
    """Each of 30 sequences is a block longer than the one before, two at a time."""
    cpu, gpu = models
    requests = [(SMALL.block_size * (n + 1) + 3, 3) for n in range(30)]
    expected, _ = decoded(cpu, requests, 2, method=method)
    found, engine = decoded(gpu, requests, 2, method=method, schedule="fused_kv")
    assert found == expected
    assert engine._runner.n_captures <= 12


def test_buffers_of_scores_are_given_back_when_recording_stops(models, tmp_path) -> None:
    cpu, gpu = models
    plain, _ = decoded(cpu, [(700, 40), (300, 40)], 2)
    recorder = Recorder(tmp_path / "trace", background=True)
    engine = Engine(gpu, SMALL, max_batch=2, recorder=recorder, record_scores=True)
    for seed, prompt in enumerate((700, 300)):
        engine.add(random_tokens(prompt, seed), 40)
    for _ in range(12):
        engine.step()
    assert any(name == "window_scores" for name, _ in engine._runner._results._rings)
    engine.stop_recording()
    recorder.close()
    assert not engine._runner._results._rings
    assert engine.run() == plain
    assert check_trace(Trace.open(tmp_path / "trace")).ok
