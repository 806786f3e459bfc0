"""Linear cost models of measured points, each with its leave-one-out error (numpy only)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nosa_sys.errors import HardwareError


@dataclass(frozen=True)
class LinearFit:
    """``time_us = fixed_us + sum_i per_unit_us[i] * feature_i``, fitted to relative errors.

    ``leave_one_out`` are relative errors |predicted - measured| / measured of each point, predicted by the model
    fitted to all the others.
    """

    features: tuple[str, ...]
    fixed_us: float
    per_unit_us: tuple[float, ...]
    leave_one_out: tuple[float, ...]

    def predict(self, values: np.ndarray) -> np.ndarray:
        """values [point, feature] -> microseconds [point]."""
        return self.fixed_us + np.asarray(values, dtype=np.float64) @ np.asarray(self.per_unit_us)

    def gbps(self, feature: str = "bytes") -> float:
        """Rate of a feature in bytes, decimal GB/s; HardwareError where the fit found no cost for it."""
        per_byte_us = self.per_unit_us[self.features.index(feature)]
        if per_byte_us <= 0:
            raise HardwareError(f"the measured times do not grow with {feature}; profile again on a quiet machine")
        return 1e-3 / per_byte_us

    def to_dict(self) -> dict[str, object]:
        errors = np.asarray(self.leave_one_out)
        return {
            "model": "time_us = fixed_us + sum(per_unit_us[f] * f)",
            "fixed_us": self.fixed_us,
            "per_unit_us": dict(zip(self.features, self.per_unit_us, strict=True)),
            "n_points": len(errors),
            "leave_one_out_median": float(np.median(errors)),
            "leave_one_out_p90": float(np.quantile(errors, 0.9)),
            "leave_one_out_max": float(errors.max()),
        }


def _solve(values: np.ndarray, times_us: np.ndarray, through_zero: bool, weights: np.ndarray) -> np.ndarray:
    """Non-negative least squares of relative errors: every row is divided by its own time, and weighed."""
    from scipy.optimize import nnls

    ones = np.full((len(values), 1), 0.0 if through_zero else 1.0)
    design = np.concatenate([ones, values], axis=1) * (weights / times_us)[:, None]
    scale = np.maximum(np.abs(design).max(axis=0), 1e-300)
    solution, _ = nnls(design / scale, weights)
    return solution / scale


def fit_linear(
    features: Sequence[str],
    values: np.ndarray,
    times_us: np.ndarray,
    *,
    through_zero: bool = False,
    weights: np.ndarray | None = None,
    groups: np.ndarray | None = None,
) -> LinearFit:
    """Fit measured ``times_us`` [point] to ``values`` [point, feature]; ``through_zero`` leaves the fixed part out.

    ``weights`` [point]: how much each point's relative error counts, default all alike. ``groups`` [point]: points of
    one group (the measurements of one run) are left out together. Raises HardwareError with fewer points than
    coefficients plus one: a leave-one-out error would be meaningless.
    """
    values, times_us = np.asarray(values, dtype=np.float64), np.asarray(times_us, dtype=np.float64)
    needed = len(features) + 2
    if len(times_us) < needed:
        raise HardwareError(f"a fit over {', '.join(features)} needs at least {needed} points, got {len(times_us)}")
    if not (np.isfinite(times_us).all() and (times_us > 0).all()):
        raise HardwareError("measured times must be finite and above 0")
    weights = np.ones(len(times_us)) if weights is None else np.asarray(weights, dtype=np.float64)
    groups = np.arange(len(times_us)) if groups is None else np.asarray(groups)
    coefficients = _solve(values, times_us, through_zero, weights)
    errors = []
    for left_out in range(len(times_us)):
        keep = groups != groups[left_out]
        others = _solve(values[keep], times_us[keep], through_zero, weights[keep])
        predicted = others[0] + values[left_out] @ others[1:]
        errors.append(abs(predicted - times_us[left_out]) / times_us[left_out])
    return LinearFit(tuple(features), float(coefficients[0]), tuple(map(float, coefficients[1:])), tuple(errors))
