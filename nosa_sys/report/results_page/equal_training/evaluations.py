"""Evaluations after equal training, as ``nosa eval`` left them: figures with their seed, name and distance to dense."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nosa_sys.report.figure import COLOURS
from nosa_sys.report.results_page.files import ResultRows, Row, is_number, read_rows
from nosa_sys.report.results_page.throughput import NAMES
from nosa_sys.sparse_config import SparseConfig

FOLDER = "h200/equal_training"
_COLOURS = {
    ("full", False): COLOURS[6],
    ("infllmv2", False): COLOURS[1],
    ("nosa", False): COLOURS[0],
    ("dma", False): COLOURS[2],
    ("nosa", True): COLOURS[4],
    ("infllmv2", True): COLOURS[5],
}
_DMA_HEAD = COLOURS[3]
_CELL = ("subject", "context", "budget_k", "block_size")  # a perplexity of an evaluation, in each of its parts


def eval_command(name: str) -> str:
    """Makes an evaluation of this page, and says where its summary.json is kept."""
    return f"nosa eval experiments/eval-{name}.yaml --texts TEXTS --out out/eval-{name} --device cuda"


def read_evaluation(root: Path, name: str) -> ResultRows:
    """``FOLDER/eval/NAME.json``: each figure also has ``seed``, ``label``, ``colour`` and, for perplexities,
    ``over_dense`` with its 95 % interval ``_low``, ``_high``: percent above dense of the same seed and texts."""
    found = read_rows(root, f"{FOLDER}/eval/{name}.json", "figures")
    if not found.document:
        return found
    recipe = _mapping(found.document.get("recipe"))
    subjects = [subject for subject in recipe.get("subjects") or [] if isinstance(subject, dict)]
    specs = {str(subject.get("name")): subject for subject in subjects}
    seeds = {name: _seed(spec.get("adapter")) for name, spec in specs.items()}
    dense = {
        seeds[row["subject"]]: row["subject"]
        for row in found.rows
        if row.get("method") == "full" and row.get("subject") in seeds
    }
    for row in found.rows:
        subject = str(row.get("subject"))
        sparse = {**_mapping(recipe.get("sparse")), **_mapping(specs.get(subject, {}).get("sparse"))}
        row |= {"seed": seeds.get(subject, 0), **series(row, sparse)}
        own = f"ratio_to_{dense.get(row['seed'])}"
        for end in ("", "_low", "_high"):
            if is_number(row.get(own + end)):
                row["over_dense" + end] = 100 * (row[own + end] - 1)
    found.document["command"] = eval_command(name)
    found.document["seeds"] = ", ".join(str(seed) for seed in sorted(set(seeds.values())))
    return found


def perplexities(stage: ResultRows, *columns: str) -> list[Row]:
    """Rows of the second half of the positions that have a number in ``columns``, each with ``over_dense_all``: percent
    above dense over all positions, those before k blocks among them, where every method attends to everything."""
    whole = {
        tuple(row.get(name) for name in _CELL): row["over_dense"]
        for row in stage.having("over_dense", kind="perplexity", part="all")
    }
    rows = stage.having("over_dense", *columns, kind="perplexity", part="second half")
    return [{**row, "over_dense_all": whole.get(tuple(row.get(name) for name in _CELL))} for row in rows]


def part_note(where: str) -> str:
    """For the caption: what `perplexities` are of, and ``where`` those over all positions stand."""
    return (
        f"Perplexity and bytes are of the second half of the positions, where every query is sparse; {where} also has "
        "all positions, the first k blocks of which attend to everything with every method."
    )


def series(row: Row, sparse: dict[str, Any]) -> Row:
    """``label`` and ``colour`` of a method with its head; a window that is not the usual share of k is named."""
    method, head = str(row.get("method")), row.get("head")
    label = "Dense" if method == "full" else NAMES.get(method, method)
    window, usual = sparse.get("window_size"), _usual_window(sparse)
    wide = method != "full" and is_number(window) and usual is not None and window != usual
    if method == "nosa" and head == "dma":
        return {"label": f"{label}, plain DMA head", "colour": _DMA_HEAD}
    if wide:
        label += f", window {int(sparse['window_size'] / sparse['block_size'])}"
    return {"label": label, "colour": _COLOURS.get((method, wide), COLOURS[7])}


def _usual_window(sparse: dict[str, Any]) -> int | None:
    """Tokens: the default's share of k."""
    if not (is_number(sparse.get("topk")) and is_number(sparse.get("block_size"))):
        return None
    usual = SparseConfig()
    return int(usual.window_size * sparse["topk"] * sparse["block_size"] / (usual.topk * usual.block_size))


def recipe_sparse(stage: ResultRows) -> dict[str, Any]:
    """The budgets at the head of an evaluation's recipe, which the models were trained with; empty if it has none."""
    return _mapping(_mapping(stage.document.get("recipe")).get("sparse"))


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _seed(adapter: Any) -> int:
    """Of a run folder such as nosa-seed1; 0 where the adapter names none."""
    found = re.search(r"-seed(\d+)/", str(adapter))
    return int(found[1]) if found else 0


def gap(name: str) -> str:
    """What a section says of an evaluation that is not there."""
    kept = f"experiments/results/{FOLDER}/eval/{name}.json"
    return f"evaluation {name}; {eval_command(name)} makes it (its summary.json is kept as {kept})"


def run_with(names: Iterable[str]) -> str:
    """The recipes behind a figure, for its caption."""
    return f"Recipes: experiments/eval-NAME.yaml with NAME {', '.join(names)}."


def by_seed(values: Mapping[int, float], form: str) -> str:
    """Values of several seeds as one text: ``1.14 and 1.17``; a value alone stands alone."""
    return " and ".join(format(values[seed], form) for seed in sorted(values))


def setting_name(context: int, k: int) -> str:
    """``8K, k 32``: tokens and blocks."""
    return f"{context // 1024}K, k {k}"


def shared_means(settings: Mapping[tuple[int, int], Mapping[str, Sequence[float]]], form: str) -> str:
    """Means over seeds of the labels that every setting (context, k) has, ``NOSA 0.2 at 8K, k 32; ...``; else empty."""
    shared = [label for label in next(iter(settings.values()), {}) if all(label in of for of in settings.values())]
    return "; ".join(
        ", ".join(f"{label} {sum(of[label]) / len(of[label]):{form}}" for label in shared)
        + f" at {setting_name(*setting)}"
        for setting, of in settings.items()
        if shared
    )


def error_bars(rows: Iterable[Row], colour: str, name: str = "over_dense") -> dict[str, Any]:
    """The 95 % interval of each row's ``name`` (its columns ``_low`` and ``_high``) as plotly takes it, of no length
    where there is none."""
    known = list(rows)
    above, below = (
        [abs(row[column] - row[name]) if is_number(row.get(column)) else 0.0 for row in known]
        for column in (f"{name}_high", f"{name}_low")
    )
    light = f"rgba({', '.join(str(part) for part in bytes.fromhex(colour[1:]))}, 0.45)"
    return {"array": above, "arrayminus": below, "thickness": 1.2, "width": 3, "color": light}
