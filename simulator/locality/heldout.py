"""A locality model held against captured sequences: the same positions, budgets and slot caches for both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import wasserstein_distance

from nosa_sys.model_shape import ModelShape
from nosa_sys.simulator.locality.captured import CapturedSequence
from nosa_sys.simulator.locality_model import ScoreModel, ScoreSource, SyntheticSelections, select_at
from nosa_sys.slot_count import slots_of
from nosa_sys.sparse_config import SparseConfig

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True)
class Setting:
    """Budgets, method, slots and policy that captured and drawn scores are both selected and served under."""

    method: str
    sparse: SparseConfig
    slots: int
    policy: str

    @property
    def label(self) -> str:
        s = self.sparse
        return (
            f"{self.method}, block {s.block_size}, k {s.topk}, select {s.select_blocks}, slots "
            f"{self.slots / s.topk:.3g} k, {self.policy}"
        )


def standard_settings(sparse: SparseConfig) -> list[Setting]:
    """The budgets given, for both methods and slots of 1, 1.25 and 1.5 k, then other query-aware shares and other k."""
    k, q = sparse.topk, sparse.select_blocks
    others = [(k, max(1, q // 2)), (k, q + q // 2), (3 * k // 4, max(1, 3 * q // 4)), (3 * k // 2, 3 * q // 2)]
    wanted = [("nosa", sparse), ("infllmv2", sparse)]
    for topk, select in others:
        if sparse.init_blocks + sparse.local_blocks + max(1, select) <= topk:
            wanted.append(("nosa", dataclasses.replace(sparse, topk=topk, select_blocks=select)))
    return [
        Setting(method, budgets, slots_of(ratio, budgets.topk), "exact" if ratio == 1.0 else "lru")
        for method, budgets in wanted
        for ratio in (1.0, 1.25, 1.5)
    ]


class CapturedSource:
    """Captured scores, played step by step as a model's would be."""

    def __init__(self, capture: CapturedSequence) -> None:
        self.betas = capture.betas
        self._scores = iter(capture.scores)

    def next_step(self, n_blocks: int) -> np.ndarray:
        return next(self._scores)[:, :n_blocks]


@dataclass(frozen=True)
class _Outcome:
    """Warm rows of one sequence: misses and gamma ``[step, layer, kv_head]``; ``cold_misses`` of the first step."""

    misses: np.ndarray
    gamma: np.ndarray
    cold_misses: int


@dataclass(frozen=True)
class Comparison:
    """One setting over some sequences; see docs/simulator.md for every figure. Errors are drawn / captured - 1."""

    setting: Setting
    captured: dict[str, float]
    drawn: dict[str, float]
    gamma_error: float
    misses_error: float | None
    bytes_error: float | None
    wasserstein: float
    kolmogorov_smirnov: float
    layer_misses_error: float | None
    sequence_errors: list[float | None]
    captured_spread: float

    def to_dict(self) -> dict[str, Any]:
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        s = self.setting
        return found | {
            "setting": {"label": s.label, "method": s.method, "slots": s.slots, "policy": s.policy} | s.sparse.to_dict()
        }


def compare(
    model: ScoreModel,
    captures: Sequence[CapturedSequence],
    settings: Sequence[Setting],
    *,
    shape: ModelShape,
    draws: int = 4,
    seed: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> list[Comparison]:
    """Compare under every setting, all of one block size; ``draws`` sequences are drawn for each captured one."""
    real: list[list[_Outcome]] = [[] for _ in settings]
    drawn: list[list[list[_Outcome]]] = [[] for _ in settings]
    for number, capture in enumerate(captures):
        recorded = _outcomes(partial(CapturedSource, capture), capture, settings, shape)
        several = []
        for draw in range(draws):
            source = partial(_drawn_source, model, capture, shape, [seed, number, draw])
            several.append(_outcomes(source, capture, settings, shape))
            if progress is not None:
                progress(number * draws + draw + 1, len(captures) * draws)
        for index in range(len(settings)):
            real[index].append(recorded[index])
            drawn[index].append([outcomes[index] for outcomes in several])
    return [_comparison(*of_one) for of_one in zip(settings, real, drawn, strict=True)]


def _drawn_source(model: ScoreModel, capture: CapturedSequence, shape: ModelShape, seed: list[int]) -> ScoreSource:
    return model.scores(shape, capture.sparse, int(capture.position[-1]) + 1, np.random.default_rng(seed))


def _outcomes(
    source: Callable[[], ScoreSource], capture: CapturedSequence, settings: Sequence[Setting], shape: ModelShape
) -> list[_Outcome]:
    """One outcome a setting; a source is opened anew for every selection, so that all see the same scores."""
    selected: dict[tuple[str, SparseConfig], SyntheticSelections] = {}
    found = []
    for setting in settings:
        key = (setting.method, setting.sparse)
        if key not in selected:
            selected[key] = select_at(source(), capture.position, shape, setting.sparse, setting.method)
        history = selected[key].history(setting.slots, setting.policy)
        found.append(_Outcome(history.n_misses[1:], selected[key].gamma()[1:], int(history.n_misses[0].sum())))
    return found


def _comparison(setting: Setting, real: list[_Outcome], drawn: list[list[_Outcome]]) -> Comparison:
    flat = [outcome for several in drawn for outcome in several]
    captured, model = _figures(real), _figures(flat)
    # every captured sequence counts by its rows, so its draws do too
    misses, drawn_misses = _values(real), _values(flat)
    levels = np.arange(max(misses.max(initial=0), drawn_misses.max(initial=0)) + 1)
    distance = np.abs(_cumulative(misses, levels) - _cumulative(drawn_misses, levels)).max()
    means = np.array([o.misses.mean() for o in real])
    drawn_means = np.array([np.mean([o.misses.mean() for o in several]) for several in drawn])
    n_bytes = np.sum([o.misses.sum() + o.cold_misses for o in real])
    drawn_bytes = np.sum([np.mean([o.misses.sum() + o.cold_misses for o in several]) for several in drawn])
    layers, drawn_layers = (np.mean([o.misses.mean(axis=(0, 2)) for o in some], axis=0) for some in (real, flat))
    return Comparison(
        setting=setting,
        captured=captured,
        drawn=model,
        gamma_error=model["gamma_macro"] - captured["gamma_macro"],
        misses_error=_ratio(drawn_means.mean(), means.mean()),
        bytes_error=_ratio(drawn_bytes, n_bytes),
        wasserstein=float(wasserstein_distance(misses, drawn_misses)),
        kolmogorov_smirnov=float(distance),
        layer_misses_error=float(np.abs(drawn_layers - layers).mean() / layers.mean()) if layers.any() else None,
        sequence_errors=[_ratio(a, b) for a, b in zip(drawn_means, means, strict=True)],
        captured_spread=float(means.std(ddof=1) / means.mean()) if len(means) > 1 and means.mean() else 0.0,
    )


def _figures(outcomes: list[_Outcome]) -> dict[str, float]:
    """Means of misses and gamma; quantiles of the misses of a layer at a step (all its KV heads)."""
    layers = np.concatenate([o.misses.sum(axis=2).reshape(-1) for o in outcomes])
    return {
        "misses": float(np.mean([o.misses.mean() for o in outcomes])),
        "gamma_macro": float(np.mean([o.gamma.mean() for o in outcomes])),
        "misses_std": float(_values(outcomes).std()),
        "step_misses_std": float(np.mean([o.misses.sum(axis=(1, 2)).std() for o in outcomes])),
        **{
            f"layer_step_{name}": float(np.quantile(layers, q, method="inverted_cdf")) for name, q in _QUANTILES.items()
        },
    }


def _values(outcomes: list[_Outcome]) -> np.ndarray:
    return np.concatenate([o.misses.reshape(-1) for o in outcomes])


def _cumulative(values: np.ndarray, levels: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.sort(values), levels, side="right") / max(1, len(values))


def _ratio(found: float, wanted: float) -> float | None:
    """found / wanted - 1; None where nothing was captured to compare with."""
    return float(found / wanted - 1.0) if wanted else None
