"""Drawn scores have the correlations, recency, spread, betas and wild steps that their formula says."""

from __future__ import annotations

import numpy as np
import pytest

from nosa_sys.simulator.locality.process import TIME_SCALES, ScoreStream, remoteness

AT_REFERENCE = -1 - 2048 // 64  # the column of the block at which remoteness is 1


def draw(process, n_blocks=400, steps=120, seed=0, block_size=64):
    stream = ScoreStream(process, n_blocks, block_size, np.random.default_rng(seed))
    return np.stack([stream.next_step(n_blocks) for _ in range(steps)]), stream


@pytest.mark.parametrize(
    "weights",
    [(1, 0, 0, 0, 0, 0), (0, 1, 0, 0, 0, 0), (0.2, 0.1, 0.1, 0.1, 0.3, 0.2), (0, 0, 0, 0, 1, 0), (0, 0, 0, 0, 0, 1)],
)
def test_autocorrelation_is_the_sum_of_the_components(make_process, weights):
    scores = draw(make_process(100, 80, weights=weights), n_blocks=40, steps=40)[0][:, :, AT_REFERENCE]
    assert scores.var() == pytest.approx(1.0, abs=0.05)
    for lag in (1, 3, 12, 30):
        expected = weights[-1] + sum(w * np.exp(-lag / s) for w, s in zip(weights[1:-1], TIME_SCALES, strict=True))
        assert np.mean(scores[lag:] * scores[:-lag]) == pytest.approx(expected, abs=0.05)


def test_betas_are_constant_normal_and_correlate_with_what_lasts(make_process):
    process = make_process(100, 80, weights=(0, 0, 0, 0, 0.5, 0.5), beta=0.6)
    scores, stream = draw(process, n_blocks=40, steps=1)
    betas = stream.betas[:, AT_REFERENCE]
    assert stream.betas.shape == (8000, 40)
    assert betas.std() == pytest.approx(1.0, abs=0.03)
    assert np.corrcoef(scores[0, :, AT_REFERENCE], betas)[0, 1] == pytest.approx(0.6, abs=0.03)


CONSTANT = (0, 0, 0, 0, 0, 1)


@pytest.mark.parametrize("block_size", [32, 64])
def test_recency_and_spread_follow_the_distance_to_the_current_block(make_process, block_size):
    """Both go with the root of the distance up to 8192 tokens, then with the logarithm of the same slope."""
    with_recency, _ = draw(make_process(weights=CONSTANT, recency=-0.5), n_blocks=600, steps=1, block_size=block_size)
    without, _ = draw(make_process(weights=CONSTANT), n_blocks=600, steps=1, block_size=block_size)
    added = (with_recency - without)[0, 0]
    for tokens, expected in ((0, 0.0), (512, -0.25), (2048, -0.5), (4608, -0.75), (8192, -1.0)):
        assert added[599 - tokens // block_size] == pytest.approx(expected, abs=1e-4)
    steepness = np.diff(remoteness(64 * np.arange(1, 400)))
    assert (steepness > 0).all()
    assert (np.diff(steepness) < 0).all()  # no jump and no kink where root and logarithm meet
    assert remoteness(np.array([16384]))[0] == pytest.approx(2.0 + np.log(2))
    many = make_process(200, 5, weights=CONSTANT)
    spread = draw(many, n_blocks=300, steps=1)[0][0].std(axis=0)
    assert spread[299 - 32] == pytest.approx(1.0, abs=0.08)
    assert spread[299 - 8] == pytest.approx(0.5, abs=0.04)


def test_recency_moves_with_the_current_block(make_process):
    added = []
    for n_blocks in (90, 91):
        recent, plain = (
            ScoreStream(make_process(weights=CONSTANT, recency=r), 100, 64, np.random.default_rng(0)).next_step(
                n_blocks
            )
            for r in (-0.5, 0.0)
        )
        assert recent.shape == (4, n_blocks)
        added.append(recent - plain)
    assert np.allclose(added[1][:, 1:], added[0], atol=1e-5)
    assert (np.diff(added[0]) > 0).all()


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
