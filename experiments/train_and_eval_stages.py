"""The two stages of ``train_and_eval``: runs of a training recipe, subjects of an evaluation, each as time allows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from nosa_sys.errors import ConfigError, NumericsError
from nosa_sys.outputs import whole_file
from nosa_sys.traces.schema import write_text_whole
from nosa_sys.training.evaluate import Evaluation
from nosa_sys.training.evaluation_settings import EvalSettings, Subject, parse_eval_recipe
from nosa_sys.training.loop import SUMMARY, Trainer, check_finished
from nosa_sys.training.recipe import TrainSettings
from nosa_sys.training.summaries import evaluation_document
from nosa_sys.training.text_sources import open_texts
from nosa_sys.training.texts import Document, read_texts

Row = dict[str, Any]
WRITTEN = "written.json"
PLAN = "recipe.json"  # what the rows of a folder are of: recipe and texts, as in summary.json
_SAVING_S = 25.0  # kept for a checkpoint of everything that learns, and for packing
_FIRST_SUBJECT_S = 60.0  # guess for a subject, until one has been timed


def train(runs: list[TrainSettings], texts: Path, folder: Path, device: str, left_s: Callable[[], float]) -> list[Row]:
    """Train every run that has no summary yet, in order, until the time is up; a row a run. ConfigError for a run that
    was finished with other settings."""
    rows: list[Row] = []
    sources = {}
    for run in runs:
        row: Row = {"run": run.directory, "finished": (folder / run.directory / SUMMARY).exists()}
        rows.append(row)
        if row["finished"]:
            check_finished(run, folder / run.directory)
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


def _read_json(path: Path, kind: type) -> Any:
    """What a file of a session before holds; ConfigError unless it is JSON of that type."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; remove {path.parent} to do it anew") from None
    if not isinstance(data, kind):
        raise ConfigError(f"{path} must hold a JSON {kind.__name__}; remove {path.parent} to do it anew")
    return data


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
    one more; a row a subject. Leaves rows-SUBJECT.parquet, and summary.json over all rows so far. ConfigError where
    rows are there that are of another recipe or of other texts, or cannot be read."""
    settings = parse_eval_recipe(recipe, str(source))
    documents = read_texts(texts)
    folder.mkdir(parents=True, exist_ok=True)
    subjects = settings.ordered_subjects
    status: list[Row] = [
        {"subject": subject.name, "finished": _rows_at(folder, subject).exists()} for subject in subjects
    ]
    anything = any(row["finished"] for row in status) or (folder / WRITTEN).exists()
    _keep_plan(folder, recipe, documents, anything)
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
        rows = pd.DataFrame(evaluation.run_subject(subject))
        write_text_whole(folder / WRITTEN, json.dumps(evaluation.written))  # first: rows say that it is there
        with whole_file(_rows_at(folder, subject), overwrite=True) as partial:
            rows.to_parquet(partial, index=False)
        row |= {"finished": True, "seconds": time.monotonic() - start_s}
        needed_s = 1.2 * row["seconds"] + 5.0
        print(json.dumps(row), flush=True)
    frames = [_read_rows(_rows_at(folder, s)) for s, row in zip(subjects, status, strict=True) if row["finished"]]
    if frames:
        plain = [plain for frame in frames for plain in _plain_rows(frame)]
        document = evaluation_document(settings, recipe, documents, plain, device)
        write_text_whole(folder / SUMMARY, json.dumps(document, indent=1) + "\n")
    return status


def _keep_plan(folder: Path, recipe: Row, documents: list[Document], anything: bool) -> None:
    """Write what the folder's rows are of; where some are there already they must be of the same: ConfigError names the
    key that differs. Subjects may come and go, the others stay as they were."""
    texts = [{"name": document.name, "sha256": document.sha256} for document in documents]
    plan = json.loads(json.dumps({"recipe": recipe, "texts": texts}))
    told = next((path for path in (folder / PLAN, folder / SUMMARY) if path.exists()), None)
    if anything and told is not None:
        saved = _read_json(told, dict)
        theirs, mine = _flat(saved), _flat(plan)
        for key in {**theirs, **mine}:
            if key.startswith("subject ") and not (key in theirs and key in mine):
                continue
            if theirs.get(key) != mine.get(key):
                was, wanted = (str(side.get(key))[:200] for side in (theirs, mine))
                raise ConfigError(
                    f"{folder} was evaluated with {key} {was}, not {wanted}; remove it, or give another --out"
                )
    write_text_whole(folder / PLAN, json.dumps(plan, indent=1) + "\n")


def _flat(plan: Row) -> Row:
    """A plan's values by name, its subjects one by one."""
    saved = plan.get("recipe", {})
    flat = {key: value for key, value in saved.items() if key not in ("subjects", "description")}
    flat |= {f"subject {subject['name']}": subject for subject in saved.get("subjects", ())}
    return flat | {"texts": plan.get("texts")}


def _read_rows(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are of these
        first = str(error).splitlines()[0]
        raise ConfigError(f"{path} cannot be read: {first}; remove it, and its subject is evaluated again") from None


def _open(settings: EvalSettings, documents: Any, folder: Path, device: str) -> Evaluation:
    evaluation = Evaluation(settings, documents, device=device, progress=lambda what, done, total: None)
    if (folder / WRITTEN).exists():
        evaluation.written = _read_json(folder / WRITTEN, dict)
        if not all(isinstance(i, int) for ids in evaluation.written.values() for i in ids):
            raise ConfigError(f"{folder / WRITTEN} must hold token ids; remove {folder} to do it anew")
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
