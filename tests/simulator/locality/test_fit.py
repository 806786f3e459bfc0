"""A fit finds the process that captures came from, and draws from it miss as the truth does."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nosa_sys.errors import TraceError
from nosa_sys.model_shape import ModelShape
from nosa_sys.simulator.locality.fit import fit_process
from nosa_sys.simulator.locality.fitted import FittedLocality
from nosa_sys.simulator.locality.heldout import compare, standard_settings
from nosa_sys.simulator.locality.moments import LAGS, moments_of
from nosa_sys.simulator.locality.process import TIME_SCALES


def lasting(process, lag):
    kept = sum(process.weights[:, j + 1] * np.exp(-lag / scale) for j, scale in enumerate(TIME_SCALES))
    return process.weights[:, -1] + kept


@pytest.mark.parametrize("weights", [(0.3, 0.0, 0.0, 0.2, 0.0, 0.5), (0.05, 0.15, 0.0, 0.0, 0.5, 0.3)])
def test_moments_show_the_correlation_of_the_truth(make_process, make_capture, weights):
    process = make_process(4, 4, weights=weights)
    capture = make_capture(process, context=16000)
    found = moments_of(capture.position, capture.scores, capture.betas, capture.sparse, 4)
    for index, lag in enumerate(LAGS[:10]):
        assert found.correlation[:, index].mean() == pytest.approx(lasting(process, lag)[0], abs=0.03)
    assert found.turmoil.mean() < 0.1  # no wild steps: only the noise of few blocks


def test_moments_show_betas_and_recency(make_process, make_capture):
    capture = make_capture(make_process(4, 4, weights=(0, 0, 0, 0, 0, 1.0), recency=-0.3, beta=0.5), context=8000)
    found = moments_of(capture.position, capture.scores, capture.betas, capture.sparse, 4)
    blocks = np.arange(1, 8000 // 64 - 8)
    spread = (0.3**2) * np.sqrt(126 - blocks).var()  # of the recency, beside noise of unit variance
    assert found.spread.mean() == pytest.approx(spread / (1 + spread), abs=0.06)
    assert found.recency.mean() == pytest.approx(-0.3 / np.sqrt(1 + spread), abs=0.04)
    assert found.beta_correlation.mean() == pytest.approx(0.5 / np.sqrt(1 + spread), abs=0.08)


def test_a_fit_misses_as_the_truth_does_on_draws_it_never_saw(make_process, make_capture):
    shape = dataclasses.replace(ModelShape.preset("smollm2-135m"), n_layers=4)
    truth = make_process(
        4, 3, weights=(0.12, 0.14, 0.0, 0.14, 0.3, 0.3), recency=-0.3, beta=0.3, wildness=0.4,
        by_all=0.3, by_layer=0.2, flatness=1.0,
    )  # fmt: skip
    seen = [make_capture(truth, context, seed=seed) for seed, context in enumerate((5000, 7000))]
    fitted = FittedLocality("truth", shape.name, (5000, 7300), {64: fit_process(seen, rounds=8)})
    unseen = [make_capture(truth, 6500, seed=seed) for seed in (11, 12)]
    found = compare(fitted, unseen, standard_settings(unseen[0].sparse)[:6], shape=shape, draws=2)
    errors = {c.setting.label: c.misses_error for c in found}
    assert max(abs(e) for e in errors.values()) < 0.12, errors  # two documents differ by this much themselves
    assert max(abs(c.gamma_error) for c in found) < 0.01
    assert fitted.processes[64].wildness.mean() == pytest.approx(0.4, abs=0.12)


def test_a_fit_is_the_same_every_time_and_follows_its_seed(make_process, make_capture):
    captures = [make_capture(make_process(1, 2), steps=256)]
    first, again, other = (fit_process(captures, rounds=2, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(first.weights, again.weights)
    assert not np.array_equal(first.weights, other.weights)


@pytest.mark.parametrize(("change", "text"), [({"steps": 255}, "255 steps"), ({"context": 1500}, "14 free blocks")])
def test_captures_too_short_are_refused(make_process, make_capture, change, text):
    with pytest.raises(TraceError, match=text):
        fit_process([make_capture(make_process(1, 2), **change)])
