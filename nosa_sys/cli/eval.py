"""``nosa eval``: perplexity, dense mass, retrieval and long generation of models and methods, on the engine."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nosa_sys.cli import console as out
from nosa_sys.cli.decode_progress import DecodeProgress
from nosa_sys.cli.options import DryRun, JsonFlag, Overwrite
from nosa_sys.cli.settings import read_yaml_mapping
from nosa_sys.errors import ConfigError
from nosa_sys.outputs import check_output, whole_directory

if TYPE_CHECKING:
    from nosa_sys.training.evaluation_settings import EvalSettings

NAME = "eval"


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="Subjects, contexts, budgets and what to do.")],
    texts: Annotated[Path, typer.Option("--texts", help="Folder or tar archive of .txt and .md files.")],
    out_dir: Annotated[Path, typer.Option("--out", help="Directory of rows.parquet and summary.json.")],
    only: Annotated[str | None, typer.Option("--only", help="Subjects to run, comma separated.")] = None,
    documents: Annotated[int | None, typer.Option("--documents", min=0, help="Documents for perplexity.")] = None,
    cases: Annotated[int | None, typer.Option("--cases", min=0, help="Texts a retrieval task and depth.")] = None,
    generations: Annotated[int | None, typer.Option("--generations", min=0, help="Long generations a subject.")] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads of torch.")] = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: JsonFlag = False,
) -> None:
    """Compare models and methods at equal blocks or equal GPU bytes; misses and bytes stand beside every figure.

    Example: [bold]nosa eval experiments/eval-heads.yaml --texts books/ --out out/eval --device cuda[/bold]
    """
    from nosa_sys.training.evaluation_settings import EVAL_KEYS, parse_eval_recipe

    data = read_yaml_mapping(recipe, EVAL_KEYS)
    changes = {"documents": documents, "cases": cases, "generation_documents": generations}
    data = {**data, **{name: value for name, value in changes.items() if value is not None}}
    settings = parse_eval_recipe(_chosen(data, only), str(recipe))
    check_output(out_dir, overwrite=overwrite)
    settings.refuse_missing_files()
    planned = plan_table(recipe, settings, device)
    if dry_run:
        out.stderr().print(planned)
        if json:
            out.print_json({"kind": "evaluation", "dry_run": True, "subjects": [s.name for s in settings.subjects]})
        return
    import pandas as pd
    import torch

    from nosa_sys.models.load import check_device
    from nosa_sys.training.evaluate import Evaluation
    from nosa_sys.training.summaries import evaluation_document
    from nosa_sys.training.texts import read_texts

    check_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    found = read_texts(texts)
    out.stderr().print(planned)
    with whole_directory(out_dir, overwrite=overwrite) as partial:
        with DecodeProgress(out.stderr()) as progress:
            evaluation = Evaluation(settings, found, device=device, progress=progress)
            rows = evaluation.run()
        pd.DataFrame(rows).to_parquet(partial / "rows.parquet", index=False)
        document = evaluation_document(settings, data, found, rows, device) | {"notes": evaluation.notes}
        (partial / "summary.json").write_text(json_module.dumps(out.plain(document), indent=1) + "\n", encoding="utf-8")
    console = out.human(json)
    for table in figure_tables(document["figures"], settings.baseline_name):
        console.print(table)
    for note in evaluation.notes:
        console.print(f"note: {note}", markup=False)
    if json:
        out.print_json(document)


def _chosen(data: dict[str, Any], only: str | None) -> dict[str, Any]:
    """The recipe with the subjects of ``only``, its baseline kept where it is one of them."""
    if only is None or not isinstance(data.get("subjects"), list):
        return data
    names = only.split(",")
    given = {subject.get("name"): subject for subject in data["subjects"] if isinstance(subject, dict)}
    unknown = [name for name in names if name not in given]
    if unknown:
        raise ConfigError(f"--only: no subject {unknown[0]!r}; known: {', '.join(map(str, given))}")
    baseline = data.get("baseline") if data.get("baseline") in names else None
    return {**data, "subjects": [given[name] for name in names], "baseline": baseline}


def plan_table(recipe: Path, settings: EvalSettings, device: str) -> Any:
    """What will run."""
    cells = ", ".join(f"{context} tokens at k {sparse.topk}" for context, sparse in settings.cells())
    rows = [(s.name, s.method, s.head, s.model, s.adapter or "-") for s in settings.ordered_subjects]
    title = f"eval {recipe} on {device}: {cells}; equal {settings.budget}, slots {settings.slots:g} k"
    return out.table(title, ("subject", "method", "head", "model", "adapter"), rows)


def figure_tables(figures: list[dict[str, Any]], baseline: str) -> list[Any]:
    """Perplexity of all positions and of their second half, what was selected, task scores, generation; each beside
    what it moves."""

    def spread(row: dict[str, Any], name: str) -> str:
        if row.get(name) is None:
            return "-"
        low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
        return f"{row[name]:.4g}" + ("" if low is None or high is None else f" ({low:.4g} to {high:.4g})")

    def make(kind: str, label: str, value: str, other: str, parts: tuple[str, ...] | None) -> Any:
        rows = [
            (
                f"{row['subject']}, {row['context']}, k {row['topk'] or 'all'}",
                row[label],
                spread(row, value),
                spread(row, other),
                row["misses_per_head_step"],
                out.size(row["h2d_bytes_per_step"]),
                out.size(row["gpu_bytes"]),
            )
            for row in figures
            if row["kind"] == kind and (parts is None or row[label] in parts)
        ]
        columns = (
            "subject",
            label,
            value.replace("_", " "),
            other.replace("_", " "),
            "misses a head",
            "H2D a step",
            "GPU",
        )
        return out.table(f"{kind}, 95 % intervals over documents", columns, rows) if rows else None

    ratio = f"ratio_to_{baseline}"
    found = [
        make("perplexity", "part", "perplexity", ratio, ("all", "second half")),
        _selection_table([row for row in figures if row["kind"] == "perplexity" and row["part"] == "all"]),
        make("task", "task", "score", f"score_minus_{baseline}", None),
        make("generation", "part", "dense_perplexity", ratio, ("all", "second half")),
    ]
    return [table for table in found if table is not None]


def _selection_table(figures: list[dict[str, Any]]) -> Any:
    """Quality and locality of the selections of sparse methods, over all positions; None where there are none. Figures
    of earlier versions lack some columns."""
    columns = {
        "dense mass": "dense_mass",
        "recall": "recall",
        "gamma": "gamma_weighted",
        "gamma, macro": "gamma_macro",
        "misses, k slots": "misses_per_head_step",
        "misses, hot": "hot_misses_per_head_step",
    }
    rows = [
        (
            f"{row['subject']}, {row['context']}",
            f"{row['topk']} x {row.get('block_size') or '?'}",
            row.get("select_blocks"),
            *(row.get(name) for name in columns.values()),
            out.size(row.get("hot_h2d_bytes_per_step")),
        )
        for row in figures
        if row["topk"] is not None
    ]
    headings = ("subject", "k x tokens", "k_q", *columns, "H2D, hot")
    return out.table("selections of all positions; hot: LRU slots over k", headings, rows) if rows else None
