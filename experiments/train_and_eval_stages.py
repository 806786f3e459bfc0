"""The two stages of ``train_and_eval``: runs of a training recipe, subjects of an evaluation, each as time allows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from nosa_sys.errors import NumericsError
from nosa_sys.training.evaluate import Evaluation
from nosa_sys.training.evaluation_settings import EvalSettings, Subject, parse_eval_recipe
from nosa_sys.training.loop import SUMMARY, Trainer
from nosa_sys.training.recipe import TrainSettings
from nosa_sys.training.summaries import evaluation_document
from nosa_sys.training.text_sources import open_texts
from nosa_sys.training.texts import read_texts

Row = dict[str, Any]
WRITTEN = "written.json"
_SAVING_S = 25.0  # kept for a checkpoint of everything that learns, and for packing
_FIRST_SUBJECT_S = 60.0  # guess for a subject, until one has been timed


def train(runs: list[TrainSettings], texts: Path, folder: Path, device: str, left_s: Callable[[], float]) -> list[Row]:
    """Train every run that has no summary yet, in order, until the time is up; a row a run."""
    rows: list[Row] = []
    sources = {}
    for run in runs:
        row: Row = {"run": run.directory, "finished": (folder / run.directory / SUMMARY).exists()}
        rows.append(row)
        if row["finished"] or left_s() < _SAVING_S:
            continue
        if run.held_out not in sources:
            sources[run.held_out] = open_texts(texts, run.held_out)
        start_s = time.monotonic()
        try:
            trainer = Trainer(run, sources[run.held_out], folder / run.directory, device=device, resume=True)
            row["loading_s"] = time.monotonic() - start_s
            done = trainer.run(on_row=_show(run), stop_after_s=left_s() - _SAVING_S)
        except NumericsError as error:  # the next run may go well
            row["error"] = str(error)
            continue
        row |= {name: done[name] for name in ("finished", "step", "session_s", "peak_gpu_bytes", "held_out_loss")}
        print(json.dumps(row), flush=True)
        del trainer
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
    return rows


def _show(run: TrainSettings) -> Callable[[Row], None]:
    def show(row: Row) -> None:
        if row["step"] % 50 == 0:
            figures = f"loss {row['loss']:.4f}, {row['tokens_per_s']:,.0f} tokens/s"
            print(f"{run.directory} step {row['step']}: {figures}", flush=True)

    return show


def evaluate(
    recipe: Row, source: Path, texts: Path, folder: Path, device: str, left_s: Callable[[], float]
) -> list[Row]:
    """Evaluate every subject whose model is there and whose rows are not, the baseline first, while the time lasts for
    one more; a row a subject. Leaves rows-SUBJECT.parquet, and summary.json over all rows so far."""
    settings = parse_eval_recipe(recipe, str(source))
    documents = read_texts(texts)
    folder.mkdir(parents=True, exist_ok=True)
    subjects = settings.ordered_subjects
    status: list[Row] = [
        {"subject": subject.name, "finished": _rows_at(folder, subject).exists()} for subject in subjects
    ]
    evaluation: Evaluation | None = None
    needed_s = _FIRST_SUBJECT_S
    for subject, row in zip(subjects, status, strict=True):
        if row["finished"]:
            continue
        row["there"] = _is_there(subject)
        if not _is_there(subjects[0]) or not row["there"] or left_s() < needed_s:
            continue
        start_s = time.monotonic()
        evaluation = evaluation or _open(settings, documents, folder, device)
        pd.DataFrame(evaluation.run_subject(subject)).to_parquet(_rows_at(folder, subject), index=False)
        (folder / WRITTEN).write_text(json.dumps(evaluation.written), encoding="utf-8")
        row |= {"finished": True, "seconds": time.monotonic() - start_s}
        needed_s = 1.2 * row["seconds"] + 5.0
        print(json.dumps(row), flush=True)
    frames = [pd.read_parquet(_rows_at(folder, s)) for s, row in zip(subjects, status, strict=True) if row["finished"]]
    if frames:
        rows = [plain for frame in frames for plain in _plain_rows(frame)]
        document = evaluation_document(settings, recipe, documents, rows, device)
        (folder / SUMMARY).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return status


def _open(settings: EvalSettings, documents: Any, folder: Path, device: str) -> Evaluation:
    evaluation = Evaluation(settings, documents, device=device, progress=lambda what, done, total: None)
    if (folder / WRITTEN).exists():
        evaluation.written = json.loads((folder / WRITTEN).read_text(encoding="utf-8"))
    return evaluation


def _rows_at(folder: Path, subject: Subject) -> Path:
    return folder / f"rows-{subject.name}.parquet"


def _is_there(subject: Subject) -> bool:
    """Whether the files of a subject exist; a name of a model that is no path counts as there."""
    paths = [Path(subject.model)] if "/" in subject.model else []
    paths += [] if subject.adapter is None else [Path(subject.adapter)]
    return all(path.exists() for path in paths)


def _plain_rows(frame: pd.DataFrame) -> list[Row]:
    """Rows as they were before: columns of other kinds left out, None for what is missing."""
    return [
        {str(name): None if isinstance(value, float) and value != value else value for name, value in row.items()}
        for row in frame.to_dict("records")
    ]
