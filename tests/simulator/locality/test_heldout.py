"""Captures against draws: captured scores give the misses of a replay, and a perfect model has no error."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from nosa_sys.cli.app import run
from nosa_sys.errors import TraceError
from nosa_sys.model_shape import ModelShape
from nosa_sys.simulator.locality.captured import captured_sequences
from nosa_sys.simulator.locality.fitted import load_fitted
from nosa_sys.simulator.locality.heldout import CapturedSource, Setting, compare, standard_settings
from nosa_sys.simulator.locality_model import select_at
from nosa_sys.simulator.simulate import simulate
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.replay import replay
from tests.traces.synthetic import make_trace

CFG = SparseConfig(block_size=32, topk=12, init_blocks=1, window_size=64, select_blocks=4)


@pytest.fixture(scope="module")
def trace_folder(tmp_path_factory):
    made = make_trace(cfg=CFG, n_layers=1, sequences=((800, 258, 0),))
    return made.write(tmp_path_factory.mktemp("long") / "trace")


SERVED = [("nosa", 12, "exact"), ("nosa", 15, "lru"), ("infllmv2", 18, "lru")]


@pytest.mark.parametrize(("method", "slots", "policy"), SERVED)
@pytest.mark.parametrize("block_size", [32, 64])
def test_captured_scores_give_the_misses_and_gamma_of_a_replay(trace_folder, method, slots, policy, block_size):
    trace = Trace.open(trace_folder)
    sparse = CFG.with_block_size(block_size)
    slots = slots * 32 // block_size + (block_size == 64)
    (capture,) = captured_sequences(trace, block_size)
    chosen = select_at(CapturedSource(capture), capture.position, trace.meta.model, sparse, method)
    expected = replay(trace, sparse=sparse, method=method, slots=slots, policy=policy)
    assert np.array_equal(chosen.history(slots, policy).n_misses.reshape(-1), expected.misses.n_misses)
    assert np.array_equal(chosen.gamma().reshape(-1), expected.gamma, equal_nan=True)


class Playback:
    """A model that draws what was captured."""

    def __init__(self, capture, hold=False):
        first = capture.scores[:1].repeat(len(capture.scores), 0)
        self._capture = dataclasses.replace(capture, scores=first) if hold else capture

    def scores(self, shape, sparse, tokens, rng):
        return CapturedSource(self._capture)

    def describe(self):
        return "playback"


def test_a_perfect_model_has_no_error_and_a_frozen_one_loads_nothing(make_process, make_capture):
    shape = dataclasses.replace(ModelShape.preset("smollm2-135m"), n_layers=2)
    capture = make_capture(make_process(2, 3), steps=80)
    settings = standard_settings(capture.sparse)
    perfect = compare(Playback(capture), [capture], settings, shape=shape, draws=2)
    assert [c.setting for c in perfect] == settings
    for found in perfect:
        assert found.misses_error == found.bytes_error == found.gamma_error == 0.0
        assert found.wasserstein == found.kolmogorov_smirnov == found.layer_misses_error == 0.0
        assert found.captured == pytest.approx(found.drawn)
    frozen = compare(Playback(capture, hold=True), [capture], settings[:1], shape=shape)[0]
    assert frozen.drawn["misses"] < 0.02 * frozen.captured["misses"]
    assert frozen.misses_error == pytest.approx(frozen.drawn["misses"] / frozen.captured["misses"] - 1.0)
    assert frozen.wasserstein == pytest.approx(frozen.captured["misses"] - frozen.drawn["misses"])  # one-sided shift
    assert frozen.gamma_error > 0


def test_distances_of_known_misses(make_process, make_capture):
    """Errors by hand, from outcomes that are counted in plain Python."""
    shape = dataclasses.replace(ModelShape.preset("smollm2-135m"), n_layers=2)
    real, other = (make_capture(make_process(2, 3), steps=40, seed=s) for s in (1, 2))
    setting = Setting("infllmv2", real.sparse, 32, "exact")
    (found,) = compare(Playback(other), [real], [setting], shape=shape, draws=1)

    def counts(capture):
        rows, previous = [], None
        for scores, position in zip(capture.scores, capture.position, strict=True):
            current = int(position) // 64
            chosen = []
            for head in range(6):
                free = sorted(range(1, current - 8), key=lambda b: (-scores[head, b], b))[: 32 - 10]
                chosen.append({0, *range(current - 8, current + 1), *free})
            if previous is not None:
                rows.append([len(new - old - {current}) for new, old in zip(chosen, previous, strict=True)])
            previous = chosen
        return np.array(rows)

    a, b = counts(real), counts(other)
    assert found.misses_error == pytest.approx(b.mean() / a.mean() - 1.0)
    assert found.captured["misses_std"] == pytest.approx(a.std())
    assert found.captured["step_misses_std"] == pytest.approx(a.sum(axis=1).std())
    assert (
        found.captured["layer_step_p90"] == np.sort(a.reshape(39, 2, 3).sum(axis=2).ravel())[int(np.ceil(0.9 * 78)) - 1]
    )
    expected = max(abs((a <= level).mean() - (b <= level).mean()) for level in range(23))
    assert found.kolmogorov_smirnov == pytest.approx(expected)
    quantiles = np.abs(np.sort(a.ravel()) - np.sort(b.ravel())).mean()  # Wasserstein of equally many values
    assert found.wasserstein == pytest.approx(quantiles)


def test_traces_without_scores_are_refused(tmp_path):
    folder = make_trace(scores=False).write(tmp_path / "trace")
    with pytest.raises(TraceError, match="--scores"):
        list(captured_sequences(Trace.open(folder), 4))


def test_fit_and_check_from_the_command_line(trace_folder, tmp_path, capsys):
    path = tmp_path / "own.json"
    assert run(["locality", "fit", str(trace_folder), "--out", str(path), "--block-sizes", "16,32"]) == 0
    assert sorted(load_fitted(path).processes) == [16, 32]
    assert run(["locality", "fit", str(trace_folder), "--out", str(path)]) == 2  # there already
    assert run(["locality", "fit", str(trace_folder), "--out", str(path), "--block-sizes", "a", "--overwrite"]) == 2
    assert run(["locality", "check", f"fitted:{path}", str(trace_folder), "--block-size", "0"]) == 2
    out = tmp_path / "check.json"
    assert run(["locality", "check", f"fitted:{path}", str(trace_folder), "--draws", "1", "--out", str(out)]) == 0
    assert "drawn: projected" in capsys.readouterr().out
    rows = json.loads(out.read_text())["comparisons"]
    assert rows[0]["setting"]["label"] == "nosa, block 32, k 12, select 4, slots 1 k, exact"
    assert rows[0]["captured"]["misses"] == pytest.approx(
        Trace.open(trace_folder).selections.n_misses[4:].mean(), abs=0.05
    )
    found = simulate(trace_folder, hardware="ideal", h2d_gbps=50.0, locality=f"fitted:{path}")
    assert found.status == "projected"
    assert any("its misses are not" in rule for rule in found.rules)
