"""Where output goes: people read tables, scripts read one strict JSON line at the very end of stdout."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table


def stderr() -> Console:
    """Banner and progress: never mixed into what a script reads."""
    return Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


def human(as_json: bool) -> Console:
    """Result tables: stdout, or stderr when stdout carries the JSON document."""
    stream = sys.stderr if as_json else sys.stdout
    return Console(stderr=as_json, highlight=False, width=None if stream.isatty() else 110)


def plain(value: Any) -> Any:
    """A value that strict JSON can carry: NaN and infinities become null, numpy scalars become numbers."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy scalar or array, without importing numpy
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def print_json(document: Mapping[str, Any]) -> None:
    """One document on one line, the last of stdout."""
    sys.stdout.write(json.dumps(plain(document), allow_nan=False) + "\n")
    sys.stdout.flush()


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A rich table; columns after the first are right-aligned numbers."""
    result = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        result.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        result.add_row(*(cell if isinstance(cell, str) else number(cell) for cell in row))
    return result


def facts(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """A two-column table of named facts."""
    result = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    result.add_column(style="dim", no_wrap=True)
    result.add_column(overflow="fold")
    for name, value in rows:
        result.add_row(name, value)
    return result


def number(value: Any) -> str:
    """A readable number: 4 significant digits, thousands separated, a dash where there is none.

    >>> number(1234567), number(0.012345), number(None)
    ('1,234,567', '0.01235', '-')
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return str(value)


def size(n_bytes: float | None) -> str:
    """Bytes with a binary unit.

    >>> size(32768), size(None)
    ('32 KiB', '-')
    """
    if n_bytes is None:
        return "-"
    value = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def progress(console: Console) -> Progress:
    """A progress bar with counts, elapsed time, ETA, and a free text field ``note`` for a live rate."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        transient=True,
    )
