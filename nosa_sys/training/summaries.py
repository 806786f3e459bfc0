"""From an evaluation's rows to its figures: means and paired comparisons with 95 % intervals over documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from nosa_sys.machine import cpu_name, git_revision, versions
from nosa_sys.training.evaluation_settings import EvalSettings
from nosa_sys.training.statistics import Interval, exponential, interval
from nosa_sys.training.texts import Document

Row = dict[str, Any]
_CELL = (
    *("subject", "method", "head", "context", "budget_k", "topk", "block_size", "select_blocks"),
    *("slots", "hot_slots", "gpu_bytes"),
)
_SIDE = (
    *("misses_per_head_step", "h2d_bytes_per_step", "hot_misses_per_head_step", "hot_h2d_bytes_per_step"),
    *("gamma_weighted", "gamma_macro", "dense_mass", "recall", "d2h_bytes_per_step"),
)


def evaluation_document(
    settings: EvalSettings, recipe: dict[str, Any], texts: Sequence[Document], rows: Sequence[Row], device: str
) -> dict[str, Any]:
    """What an evaluation leaves beside its rows: figures, and all that they depend on."""
    return {
        "kind": "evaluation",
        "name": settings.name,
        "status": "measured",
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_name(),
        "recipe": recipe,
        "texts": [{"name": text.name, "sha256": text.sha256} for text in texts],
        "figures": summarise(rows, [subject.name for subject in settings.subjects], settings.seed),
        "versions": versions(),
        "git_revision": git_revision(),
    }


def summarise(rows: Sequence[Row], against: Iterable[str], seed: int = 0) -> list[Row]:
    """One figure a subject, cell and part or task. Perplexities are also divided by those of each subject named in
    ``against``, document by document; so are task scores, as differences."""
    names = list(against)
    figures = []
    for kind, label, value in (
        ("perplexity", "part", "loss_sum"),
        ("generation", "part", "dense_loss_sum"),
        ("task", "task", "score"),
    ):
        chosen = [row for row in rows if row["kind"] == kind]
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in chosen:
            groups.setdefault((row["subject"], row["context"], row["budget_k"], row[label]), []).append(row)
        for (subject, context, k, part), group in groups.items():
            figure: Row = {"kind": kind, **{name: group[0].get(name) for name in _CELL}, label: part}
            figure |= {"documents": len({row["document"] for row in group}), "rows": len(group)}
            figure |= _estimate(kind, group, value, seed)
            for other in names:
                if other != subject and (theirs := groups.get((other, context, k, part))) is not None:
                    figure |= _comparison(kind, group, theirs, value, other, seed)
            figure |= {name: _mean(row.get(name) for row in group) for name in _SIDE}
            if kind == "generation":
                figure |= {
                    name: _mean(row[name] for row in group)
                    for name in ("agreement_with_baseline", "distinct_4_grams", "first_difference")
                }
                tokens = [row["n_tokens"] for row in group]
                read = exponential(interval([row["baseline_text_loss_sum"] for row in group], tokens, seed=seed))
                figure["baseline_text_perplexity"] = read.value
            figures.append(figure)
    return figures


def _counts(kind: str, group: Sequence[Row]) -> list[float]:
    return [1.0 if kind == "task" else row["n_tokens"] for row in group]


def _by_document(group: Sequence[Row], values: Sequence[float]) -> list[float]:
    """Sums over each document's rows: cases made from one text are not independent."""
    sums: dict[str, float] = {}
    for row, value in zip(group, values, strict=True):
        sums[row["document"]] = sums.get(row["document"], 0.0) + value
    return list(sums.values())


def _interval(kind: str, group: Sequence[Row], values: Sequence[float], seed: int) -> Interval:
    return interval(_by_document(group, values), _by_document(group, _counts(kind, group)), seed=seed)


def _estimate(kind: str, group: Sequence[Row], value: str, seed: int) -> Row:
    found = _interval(kind, group, [row[value] for row in group], seed)
    if kind == "task":
        return _columns("score", found)
    name = "perplexity" if kind == "perplexity" else "dense_perplexity"
    return _columns(name, exponential(found))


def _comparison(kind: str, group: Sequence[Row], theirs: Sequence[Row], value: str, other: str, seed: int) -> Row:
    """Rows of both subjects are made in the same order from the same documents and cases."""
    gaps = [mine[value] - yours[value] for mine, yours in zip(group, theirs, strict=True)]
    found = _interval(kind, group, gaps, seed)
    if kind == "task":
        return _columns(f"score_minus_{other}", found)
    return _columns(f"ratio_to_{other}", exponential(found))


def _columns(name: str, of: Interval) -> Row:
    low, high = (None if np.isnan(x) else x for x in (of.low, of.high))
    return {name: of.value, f"{name}_low": low, f"{name}_high": high}


def _mean(values: Iterable[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
