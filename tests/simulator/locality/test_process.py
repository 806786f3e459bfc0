"""Drawn scores have the correlations, recency, flatness, betas and wild steps that their formula says."""

from __future__ import annotations

import numpy as np
import pytest

from nosa_sys.simulator.locality.process import TIME_SCALES, ScoreStream, remoteness, spread_of


def draw(process, n_blocks=400, steps=120, seed=0, block_size=64):
    stream = ScoreStream(process, n_blocks, block_size, np.random.default_rng(seed))
    return np.stack([stream.next_step(n_blocks) for _ in range(steps)]), stream


@pytest.mark.parametrize(
    "weights",
    [(1, 0, 0, 0, 0, 0), (0, 1, 0, 0, 0, 0), (0.2, 0.1, 0.1, 0.1, 0.3, 0.2), (0, 0, 0, 0, 1, 0), (0, 0, 0, 0, 0, 1)],
)
def test_autocorrelation_is_the_sum_of_the_components(make_process, weights):
    scores, _ = draw(make_process(weights=weights), n_blocks=6000, steps=40)
    assert scores.var() == pytest.approx(1.0, abs=0.04)
    for lag in (1, 3, 12, 30):
        expected = weights[-1] + sum(w * np.exp(-lag / s) for w, s in zip(weights[1:-1], TIME_SCALES, strict=True))
        assert np.mean(scores[lag:] * scores[:-lag]) == pytest.approx(expected, abs=0.04)


def test_betas_are_constant_normal_and_correlate_with_what_lasts(make_process):
    scores, stream = draw(make_process(weights=(0, 0, 0, 0, 0.5, 0.5), beta=0.6), n_blocks=6000, steps=1)
    assert stream.betas.shape == (4, 6000)
    assert stream.betas.std() == pytest.approx(1.0, abs=0.03)
    assert np.corrcoef(scores[0].ravel(), stream.betas.ravel())[0, 1] == pytest.approx(0.6, abs=0.03)


CONSTANT = (0, 0, 0, 0, 0, 1)


def test_recency_follows_the_distance_to_the_current_block(make_process):
    """The root of the distance up to 8192 tokens, then the logarithm that goes on with the same slope."""
    with_recency, _ = draw(make_process(weights=CONSTANT, recency=-0.5), n_blocks=300, steps=1)
    without, _ = draw(make_process(weights=CONSTANT), n_blocks=300, steps=1)
    added = (with_recency - without)[0, 0]
    for blocks, expected in ((0, 0.0), (1, -0.5), (16, -2.0), (64, -4.0), (128, -0.5 * 128**0.5)):
        assert added[299 - blocks] == pytest.approx(expected, abs=1e-3)
    steepness = np.diff(remoteness(64 * np.arange(1, 400)))
    assert (steepness > 0).all()
    assert (np.diff(steepness) < 0).all()  # no jump and no kink where root and logarithm meet
    assert remoteness(np.array([16384]))[0] - 128**0.5 == pytest.approx(128**0.5 * np.log(2) / 2)


def test_recency_moves_with_the_current_block_and_the_rest_stays(make_process):
    stream = ScoreStream(make_process(weights=CONSTANT, recency=-0.5), 100, 64, np.random.default_rng(0))
    first, later = stream.next_step(90), stream.next_step(91)
    assert first.shape == (4, 90)
    assert later.shape == (4, 91)
    plain = ScoreStream(make_process(weights=CONSTANT), 100, 64, np.random.default_rng(0)).next_step(91)
    assert np.allclose((later - plain)[:, 1:91], (first - plain[:, :90]), atol=1e-5)


@pytest.mark.parametrize("weights", [CONSTANT, (0, 0, 0, 0, 1, 0), (0, 0, 0, 0, 0.4, 0.6)])
def test_flatness_bounds_what_lasts_and_keeps_its_spread(make_process, weights):
    flatness = 1.5
    scores, _ = draw(make_process(weights=weights, flatness=flatness), n_blocks=8000, steps=1)
    assert scores.std() == pytest.approx(1.0, abs=0.02)
    normal = np.random.default_rng(9).standard_normal(200_000)
    assert spread_of(flatness) == pytest.approx(np.tanh(flatness * normal).std(), rel=0.01)
    assert np.abs(scores).max() <= 1.0 / spread_of(flatness) + 1e-5
    assert spread_of(0.01) == pytest.approx(0.01, rel=0.001)


def test_wild_steps_are_shared_as_asked(make_process):
    shares = {"by_all": 0.4, "by_layer": 0.3}
    process = make_process(3, 2, weights=(1, 0, 0, 0, 0, 0), wildness=0.5, **shares)
    scores, _ = draw(process, n_blocks=400, steps=3000)
    loudness = 0.5 * np.log(np.square(scores).mean(axis=2))  # s n - s^2, but for the noise of 400 blocks
    expected = 0.25
    assert np.mean(loudness.var(axis=0)) == pytest.approx(expected, abs=0.03)
    covariance = np.cov(loudness.T)
    assert np.mean([covariance[0, 1], covariance[2, 3], covariance[4, 5]]) == pytest.approx(0.7 * expected, abs=0.03)
    assert covariance[:2, 2:].mean() == pytest.approx(0.4 * expected, abs=0.03)
    assert np.square(scores).mean() == pytest.approx(1.0, abs=0.1)


def test_same_seed_same_scores_and_other_models_follow_layers_and_heads(make_process):
    process = make_process()
    assert np.array_equal(draw(process, seed=3)[0], draw(process, seed=3)[0])
    assert not np.array_equal(draw(process, seed=3)[0], draw(process, seed=4)[0])
    process.recency[:] = [0.0, 0.1, 0.2, 0.3]
    mapped = process.for_heads(np.array([0, 1, 1]), np.array([1, 0, 1]))
    assert (mapped.n_layers, mapped.n_kv_heads) == (3, 3)
    assert mapped.recency.tolist() == [0.1, 0.0, 0.1, 0.3, 0.2, 0.3, 0.3, 0.2, 0.3]
