"""What the recorder writes: read back, checked by the trace checker, and counted again from the oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from nosa_sys.engine.cuda.results import StepResults
from nosa_sys.engine.engine import Engine
from nosa_sys.engine.recorder import Recorder
from nosa_sys.errors import ConfigError, TraceError
from nosa_sys.traces.check import check_trace
from nosa_sys.traces.reader import Trace
from tests.engine.helpers import METHODS, SMALL, TINY, Watch, random_tokens, tiny_model
from tests.engine.oracle import OracleRun, run_oracle

BLOCK_BYTES = 2 * 16 * 8 * 8
TEXTS = [random_tokens(130, 1), random_tokens(60, 2), random_tokens(170, 3)]
NEW = (40, 30, 20)


def record(directory: Path, method: str, **options: object) -> tuple[Engine, Watch]:
    """Three sequences, the last one joining later and the second one cancelled."""
    with Recorder(directory, facts={"seed": 4, "driver": "none"}) as recorder:
        engine = Engine(tiny_model(12), SMALL, method=method, recorder=recorder, prefill_chunk=40, **options)
        watch = Watch(engine)
        for text, new in zip(TEXTS[:2], NEW, strict=False):
            engine.add(text[:-new], new, force_tokens=text[-new:])
        for _ in range(9):
            watch.step()
        engine.add(TEXTS[2][:-20], 20, force_tokens=TEXTS[2][-20:])
        engine.cancel(1)
        watch.run()
    return engine, watch


HOT = ({"slots": 7, "policy": "lru"}, {"slots": 6, "policy": "beta"})
FUSED = (
    {"runner": "kernels", "schedule": "split_merge", "inspect": True},
    {"runner": "kernels", "schedule": "two_batch", "inspect": True},
)


@pytest.mark.parametrize(
    ("method", "options"), [*((m, {}) for m in METHODS), *((m, more) for m in METHODS[:3] for more in (*HOT, *FUSED))]
)
def test_trace_passes_the_check_and_equals_the_oracle(tmp_path: Path, method: str, options: dict) -> None:
    engine, _ = record(tmp_path / "t", method, record_scores=True, **options)
    trace = Trace.open(tmp_path / "t")
    report = check_trace(trace)
    assert not report.problems, report.problems[:3]
    assert (trace.meta.driver, trace.meta.seed, trace.meta.n_steps, trace.meta.complete) == ("none", 4, 40, True)
    assert [(s.prompt_tokens, s.new_tokens) for s in trace.meta.sequences] == [(90, 40), (30, 9), (150, 20)]
    oracles = [run_oracle(engine.model, SMALL, method, text) for text in TEXTS]
    assert_selections(trace, oracles)
    assert_scores_and_betas(trace, oracles)
    steps = trace.table("steps").to_pandas()
    summary = engine.summary()
    for layers in (steps[steps.layer >= 0], steps[steps.layer == -1]):
        assert layers.h2d_bytes.sum() == summary["h2d_bytes"] == summary["blocks_loaded"] * BLOCK_BYTES
        assert layers.d2h_bytes.sum() == summary["d2h_bytes"]
    assert (steps.prefetch_bytes.sum(), steps.wasted_prefetch_bytes.sum()) == (0, 0)
    timed = (
        steps if engine.runner_name == "eager" else steps[steps.layer == -1]
    )  # fused layers have no clock by default
    assert timed.time_us.notna().all()


def assert_selections(trace: Trace, oracles: list[OracleRun]) -> None:
    table = trace.table("selections").to_pandas()
    assert len(table) == (40 + 9 + 20) * TINY.n_layers * TINY.n_kv_heads
    previous: dict[tuple[int, int, int], set[int]] = {}
    for row in table.itertuples():
        chosen = oracles[row.sequence].selected[row.position][row.layer][row.kv_head]
        assert list(row.block_ids) == chosen
        assert row.h2d_bytes == row.n_misses * BLOCK_BYTES
        key = (row.sequence, row.layer, row.kv_head)
        if row.cold:
            assert np.isnan(row.gamma)
        else:
            assert row.gamma == len(previous[key] & set(chosen)) / len(chosen)
        previous[key] = set(chosen)


def assert_scores_and_betas(trace: Trace, oracles: list[OracleRun]) -> None:
    """Scores of every row, and every window's beta mean exactly once."""
    selections = trace.table("selections").to_pandas().set_index(["step", "sequence", "layer", "kv_head"])
    scores = trace.table("scores").to_pandas().set_index(["step", "sequence", "layer", "kv_head"])
    assert len(scores) == len(selections)
    joined = selections[["position"]].join(scores)
    for (_, sequence, layer, head), row in joined.iterrows():
        expected = oracles[sequence].window_scores[row.position][layer][head]
        np.testing.assert_allclose(row.window_scores, expected, rtol=1e-6, atol=1e-9)
    betas = trace.table("betas").to_pandas()
    assert not betas.duplicated(["sequence", "layer", "kv_head", "window"]).any()
    last = selections.reset_index().groupby("sequence").position.max()
    for sequence, position in last.items():
        for layer in range(2):
            for head in range(2):
                mine = betas[(betas.sequence == sequence) & (betas.layer == layer) & (betas.kv_head == head)]
                assert sorted(mine.window) == list(range(SMALL.n_windows(position + 1)))
                means = mine.sort_values("window").beta_mean.to_numpy()
                pooled = oracles[sequence].pooled_betas[position][layer][head]
                for j, expected in enumerate(pooled):
                    near = means[max(0, 2 * j - 1) : 2 * j + 2]
                    assert near.max(initial=-np.inf) == pytest.approx(expected, rel=1e-6)


def test_prefill_bytes(tmp_path: Path) -> None:
    """Prompt 150: 149 tokens in chunks of 40; 9 blocks written, and 2 + 5 + 7 read back for the later chunks."""
    with Recorder(tmp_path / "t") as recorder:
        engine = Engine(tiny_model(), SMALL, recorder=recorder, prefill_chunk=40)
        engine.add(random_tokens(150, 0), 3)
        engine.run()
    prefill = Trace.open(tmp_path / "t").table("prefill").to_pandas()
    assert prefill.layer.tolist() == [0, 1]
    assert prefill.n_tokens.tolist() == [149, 149]
    assert prefill.d2h_bytes.tolist() == [9 * 2 * BLOCK_BYTES] * 2
    assert prefill.h2d_bytes.tolist() == [(2 + 5 + 7) * 2 * BLOCK_BYTES] * 2
    assert engine.summary()["prefill_h2d_bytes"] == 2 * 14 * 2 * BLOCK_BYTES


def test_recording_changes_nothing(tmp_path: Path) -> None:
    engine, watch = record(tmp_path / "t", "nosa", record_scores=True)
    plain = Engine(engine.model, SMALL, prefill_chunk=40)
    text = TEXTS[0]
    sequence = plain.add(text[:-40], 40, force_tokens=text[-40:])
    for mine, other in zip(Watch(plain).run()[sequence], watch.rows[0], strict=True):
        assert (mine.selected, mine.misses) == (other.selected, other.misses)
        np.testing.assert_allclose(mine.logits, other.logits, rtol=0, atol=1e-12)


def test_a_failed_run_leaves_an_incomplete_trace(tmp_path: Path) -> None:
    def fail_after_two_steps() -> None:
        with Recorder(tmp_path / "t") as recorder:
            engine = Engine(tiny_model(), SMALL, recorder=recorder)
            engine.add([1, 2, 3], 9)
            engine.step()
            engine.step()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_after_two_steps()
    with pytest.raises(TraceError, match=r"recover|incomplete"):
        Trace.open(tmp_path / "t")
    assert len(Trace.recover(tmp_path / "t").selections) == 2 * 2 * 2


def test_a_killed_run_keeps_most_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a step finds on disk is what a kill at that moment would leave: here nothing is ever closed."""
    recorder = Recorder(tmp_path / "t")
    engine = Engine(tiny_model(), SMALL, recorder=recorder, record_scores=True)
    engine.add(random_tokens(90, 0), 99)
    for n_steps in range(1, 21):
        engine.step()
        trace = Trace.recover(tmp_path / "t")
        assert n_steps / 2 < trace.meta.n_steps <= n_steps
        assert not check_trace(trace).problems
    assert trace.meta.n_steps == 16, "the doubling flushes"
    monkeypatch.setattr("nosa_sys.engine.recorder.FLUSH_INTERVAL_S", 0.0)
    engine.step()
    assert Trace.recover(tmp_path / "t").meta.n_steps == 21, "the flush by time"


def test_a_recorder_serves_one_engine(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "t")
    with pytest.raises(ConfigError, match="no engine yet"):
        recorder.close()
    Engine(tiny_model(), SMALL, recorder=recorder)
    with pytest.raises(ConfigError, match="serves an engine already"):
        Engine(tiny_model(), SMALL, recorder=recorder)


@pytest.mark.parametrize("options", [{}, {"runner": "kernels", "schedule": "split_merge"}])
def test_an_engine_goes_on_after_its_recording_stops(tmp_path: Path, options: dict) -> None:
    model = tiny_model(12)
    alone = Engine(model, SMALL)
    alone.add(random_tokens(120, 1), 40)
    recorder = Recorder(tmp_path / "t")
    engine = Engine(model, SMALL, recorder=recorder, record_scores=True, **options)
    engine.add(random_tokens(120, 1), 40)
    for _ in range(10):
        engine.step()
    assert engine.last_plan is not None
    assert engine.last_plan.window_scores is not None
    engine.stop_recording()
    recorder.close()
    engine.step()
    assert engine.last_plan.window_scores is engine.last_plan.new_beta_means is None
    assert engine.run() == alone.run()
    trace = Trace.open(tmp_path / "t")
    assert not check_trace(trace).problems
    assert trace.meta.n_steps == 10


def test_buffers_of_results_are_bounded_and_given_back() -> None:
    """Scores widen as contexts grow: the shapes used last keep their buffers, until all are released."""
    results = StepResults(torch.device("cpu"))
    tensors = [torch.zeros(2, width) for width in range(1, 9)]
    rings = [results._ring("window_scores", tensor) for tensor in tensors]
    other = results._ring("packed", tensors[0])
    assert results._ring("window_scores", tensors[4]) is rings[4]
    results._ring("window_scores", torch.zeros(2, 20))
    kept = [key for key in results._rings if key[0] == "window_scores"]
    assert [shape[1] for _, shape in kept] == [7, 8, 5, 20]
    assert results._ring("packed", tensors[0]) is other
    results.release()
    assert not results._rings


class _Copying:
    """An event of a copy through all rings; waiting for it notes how many of them are still there."""

    def __init__(self, results: StepResults) -> None:
        self._results, self.rings = results, []

    def synchronize(self) -> None:
        self.rings.append(len(self._results._rings))


@pytest.mark.parametrize("n_shapes", [4, 1])
def test_case_09_no_buffer_is_given_back_while_a_copy_runs_through_it(n_shapes: int) -> None:
    """By a fifth shape or by ``release``: the copy is waited for first, with all buffers in place."""
    results = StepResults(torch.device("cpu"))
    copying = _Copying(results)
    for width in range(n_shapes):
        results._ring("window_scores", torch.zeros(2, width))
    results._last.append(copying)
    if n_shapes == 4:
        results._ring("window_scores", torch.zeros(2, 9))
    else:
        results.release()
    assert copying.rings == [n_shapes]


def test_case_14_steps_after_the_recording_neither_run_old_graphs_nor_send_scores(tmp_path: Path) -> None:
    """Stopped while a step is on its way: it is read and recorded, then the graphs and buffers go."""
    recorder = Recorder(tmp_path / "t")
    engine = Engine(tiny_model(12), SMALL, recorder=recorder, record_scores=True, runner="kernels", schedule="fused_kv")
    engine._runner.looks_ahead = engine._whole_life = True  # no growth that would drop graphs by itself
    engine.add(random_tokens(120, 1), 40)
    for _ in range(10):
        engine.step()
    runner, in_flight, sent = engine._runner, [], []
    stop, send = runner.stop_recording, runner._results.send

    def stopped() -> None:
        in_flight.append(len(runner._in_flight))
        stop()

    def noted(tensors: dict[str, torch.Tensor]) -> object:
        sent.append(set(tensors))
        return send(tensors)

    runner.stop_recording, runner._results.send = stopped, noted
    assert len(runner._in_flight) == 1
    old = list(runner._graphs.values())
    engine.stop_recording()
    recorder.close()
    engine.run()
    assert in_flight == [0]
    assert old
    assert sent
    assert not any(names & {"window_scores", "new_beta_means"} for names in sent)
    assert not [graph for graph in runner._graphs.values() if any(graph is one for one in old)]
    assert Trace.open(tmp_path / "t").meta.n_steps == 11
