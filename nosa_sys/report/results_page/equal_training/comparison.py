"""A subject beside InfLLMv2 on the same texts: perplexity above it and above dense, bytes a step, limits asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nosa_sys.report.results_page.files import Row, is_number

OVER_DENSE, OVER_INFLLMV2, BYTES = 1.0, 0.5, 45.0  # percent: the limits asked for
COLUMNS = ("h2d_bytes_per_step", "hot_h2d_bytes_per_step")
Levels = dict[tuple[Any, ...], Row]


@dataclass(frozen=True)
class Point:
    """``loaded``: percent of what ``level`` (InfLLMv2 on the same texts, same seed) loads, at slots = k and with LRU
    slots, None where it was not counted."""

    row: Row
    level: Row

    @property
    def loaded(self) -> tuple[float | None, ...]:
        return tuple(
            100 * self.row[name] / self.level[name]
            if is_number(self.row.get(name)) and is_number(self.level.get(name)) and self.level[name] > 0
            else None
            for name in COLUMNS
        )

    @property
    def over_infllmv2(self) -> float:
        """Percent of perplexity."""
        return float(100 * (self.row["perplexity"] / self.level["perplexity"] - 1))

    def meets(self, panel: int) -> bool:
        """All three limits, with the slots of a panel."""
        share = self.loaded[panel]
        near = self.row["over_dense"] <= OVER_DENSE and self.over_infllmv2 <= OVER_INFLLMV2
        return near and share is not None and share <= BYTES

    @property
    def text(self) -> str:
        """For the pointer: what the axes do not show."""
        row = self.row
        parts = [
            f"{row['label']}, seed {row['seed']}, k {row['budget_k']}, k_q {row.get('select_blocks')}",
            f"perplexity {row['perplexity']:.3f}, {row['over_dense']:+.2f} % over dense, "
            f"{self.over_infllmv2:+.2f} % over InfLLMv2 at k {self.level['budget_k']}",
        ]
        kept = [
            f"{name} {row[name]:.3f}" for name in ("recall", "dense_mass", "gamma_macro") if is_number(row.get(name))
        ]
        memory = f"{row['gpu_bytes'] / 1e6:.0f} MB a sequence on the GPU" if is_number(row.get("gpu_bytes")) else ""
        return "<br>".join(text for text in (*parts, ", ".join(kept), memory) if text)


def _cell(row: Row, topk: int | None = None) -> tuple[Any, ...]:
    """What two rows must share to be compared."""
    return row.get("context"), row.get("documents"), row["seed"], topk or row["budget_k"]


def levels_of(rows: Iterable[Row]) -> Levels:
    """InfLLMv2 as trained, by what a row must share with it."""
    return {_cell(row): row for row in rows if row["label"] == "InfLLMv2"}


def points(rows: list[Row], levels: Levels, topk: int | None = None) -> list[Point]:
    """Rows that have InfLLMv2 beside them: at their own k, or at ``topk``."""
    return [Point(row, levels[_cell(row, topk)]) for row in rows if _cell(row, topk) in levels]


def table(compared: list[Point]) -> tuple[tuple[Any, ...], ...]:
    """Every setting of two seeds or one, against the limits."""
    head = (
        *("context", "k", "subject", "k_q", "seed", "perplexity", "over dense, %", "over InfLLMv2, %"),
        *("bytes, slots = k, %", "bytes, LRU, %", "over dense, all, %"),
    )
    rows = [
        (
            f"{p.row['context'] // 1024}K", p.row["budget_k"],
            p.row["label"], p.row.get("select_blocks"), p.row["seed"],
            f"{p.row['perplexity']:.3f}", f"{p.row['over_dense']:.2f}", f"{p.over_infllmv2:.2f}",
            *(None if share is None else f"{share:.1f}" for share in p.loaded),
            f"{p.row['over_dense_all']:.2f}" if is_number(p.row.get("over_dense_all")) else None,
        )
        for p in sorted(compared, key=_order)
        if p.row is not p.level
    ]  # fmt: skip
    return (head, *rows) if rows else ()


def _order(point: Point) -> tuple[Any, ...]:
    row = point.row
    return row["context"], -row["budget_k"], row["label"], row.get("select_blocks") or 0, row["seed"]
