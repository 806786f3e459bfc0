"""Fits recover known models, and their leave-one-out error shows a model that does not hold."""

import numpy as np
import pytest

from nosa_sys.errors import HardwareError
from nosa_sys.profiling.fits import fit_linear


def test_recovers_a_linear_cost() -> None:
    n_bytes = np.array([[1e4], [1e5], [1e6], [1e7], [1e8]])
    fit = fit_linear(["bytes"], n_bytes, 2.9 + n_bytes[:, 0] / 50.8e3)
    assert fit.fixed_us == pytest.approx(2.9, rel=1e-6)
    assert fit.gbps() == pytest.approx(50.8, rel=1e-6)
    assert max(fit.leave_one_out) < 1e-6
    assert fit.predict(np.array([[2e6]]))[0] == pytest.approx(2.9 + 2e6 / 50.8e3)


def test_two_features_are_told_apart() -> None:
    rng = np.random.default_rng(3)
    values = rng.uniform(1, 100, size=(30, 2))
    fit = fit_linear(["bytes", "elements"], values, 5 + 0.25 * values[:, 0] + 2 * values[:, 1])
    assert fit.per_unit_us == pytest.approx((0.25, 2.0), rel=1e-6)


def test_through_zero_has_no_fixed_part() -> None:
    n_bytes = np.array([[1.0], [2.0], [4.0]])
    fit = fit_linear(["bytes"], n_bytes, 10 + n_bytes[:, 0], through_zero=True)
    assert fit.fixed_us == 0
    assert fit.per_unit_us[0] > 1


def test_a_knee_shows_in_the_leave_one_out_error() -> None:
    n_bytes = np.array([[1.0], [2.0], [4.0], [8.0], [16.0], [32.0]])
    times = np.where(n_bytes[:, 0] < 8, 10.0, 100.0)
    assert max(fit_linear(["bytes"], n_bytes, times).leave_one_out) > 0.3


@pytest.mark.parametrize("times", [[1.0, 2.0], [1.0, np.nan, 3.0], [1.0, 0.0, 2.0]])
def test_refuses_what_cannot_be_fitted(times: list[float]) -> None:
    with pytest.raises(HardwareError):
        fit_linear(["bytes"], np.arange(1.0, len(times) + 1)[:, None], np.array(times))


def test_no_rate_where_times_do_not_grow() -> None:
    fit = fit_linear(["bytes"], np.array([[1.0], [2.0], [3.0]]), np.array([5.0, 5.0, 5.0]))
    with pytest.raises(HardwareError, match="do not grow with bytes"):
        fit.gbps()
