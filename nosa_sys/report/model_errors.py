"""How well a profile's models fit its own points: leave-one-out errors that predictions carry with them."""

from __future__ import annotations

from typing import Any

_KEYS = ("name", "n_points", "median", "p90", "worst")


def model_error_rows(predictions: list[dict[str, Any]]) -> list[list[Any]]:
    """Head row, then a row a fit and profile, each once; the head alone where predictions carry none."""
    rows: list[list[Any]] = [["profile", "model", "points", "median error", "p90", "worst"]]
    for prediction in predictions:
        settings, errors = prediction.get("settings") or {}, prediction.get("model_errors") or []
        for one in errors if isinstance(errors, list) else []:
            if not isinstance(one, dict) or not all(isinstance(one.get(key), int | float) for key in _KEYS[1:]):
                continue
            shares = [f"{one[key]:.1%}" for key in _KEYS[2:]]
            row = [str(settings.get("hardware")), str(one.get("name")), one["n_points"], *shares]
            if row not in rows:
                rows.append(row)
    return rows
