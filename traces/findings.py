"""Findings: collects the problems that the rules of `check_trace` report, bounded in number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MAX_PER_RULE = 100


@dataclass(frozen=True)
class Problem:
    """One broken rule. ``row`` counts the table's rows as stored, over all parts; None for the whole table."""

    table: str
    row: int | None
    rule: str
    detail: str

    def __str__(self) -> str:
        where = self.table if self.row is None else f"{self.table} row {self.row}"
        return f"{where}: {self.rule}: {self.detail}"


@dataclass(frozen=True)
class CheckReport:
    """Result of `check_trace`. ``problems`` holds at most MAX_PER_RULE of each rule, ``counts`` says how many there
    are; ``n_rows`` is the number of selection rows; ``facts`` says what was verified and how close rows came."""

    problems: list[Problem]
    n_rows: int
    counts: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "n_rows": self.n_rows,
            "counts": dict(self.counts),
            "problems": [vars(p) for p in self.problems],
            "facts": dict(self.facts),
        }


class Findings:
    """Where the rules write: problems, their counts, and facts."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.counts: Counter[str] = Counter()
        self.facts: dict[str, Any] = {}

    def add(self, table: str, row: int | None, rule: str, detail: str) -> None:
        self.counts[rule] += 1
        if self.counts[rule] <= MAX_PER_RULE:
            self.problems.append(Problem(table, row, rule, detail))

    def add_rows(
        self, table: str, rule: str, bad: np.ndarray, detail: Callable[[int], str], stored: np.ndarray | None = None
    ) -> None:
        """Report each row where ``bad`` ``[row]`` is set; ``detail`` gets its index.

        ``stored`` ``[row]`` maps the index to the table's row number; without it they are the same.
        """
        rows = np.flatnonzero(bad)
        for row in rows[: max(0, MAX_PER_RULE - self.counts[rule])].tolist():
            self.problems.append(Problem(table, row if stored is None else int(stored[row]), rule, detail(row)))
        if len(rows):
            self.counts[rule] += len(rows)
