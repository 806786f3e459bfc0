"""``nosa train``: run a training recipe over a folder or archive of texts."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nosa_sys.cli import console as out
from nosa_sys.cli.options import DryRun, JsonFlag, Overwrite
from nosa_sys.cli.settings import read_yaml_mapping
from nosa_sys.errors import ConfigError
from nosa_sys.outputs import check_output

if TYPE_CHECKING:
    from nosa_sys.training.recipe import TrainSettings
    from nosa_sys.training.text_sources import TextSource

NAME = "train"


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="What to train, and how.")],
    texts: Annotated[
        Path, typer.Option("--texts", help="Folder or tar archive of .txt and .md files, or a --pack file.")
    ],
    out_dir: Annotated[Path | None, typer.Option("--out", help="Directory that takes a folder a run.")] = None,
    pack: Annotated[
        Path | None, typer.Option("--pack", help="Only write the runs' token sequences to this .safetensors file.")
    ] = None,
    only: Annotated[str | None, typer.Option("--only", help="Runs to do, by name, comma separated.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Only runs of this seed.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Another number of steps for every run.")] = None,
    attention: Annotated[str | None, typer.Option("--attention", help="sdpa, flex or triton, for every run.")] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads of torch.")] = None,
    stop_after: Annotated[
        float | None,
        typer.Option("--stop-after", min=0, help="Seconds after which to save and stop; --resume goes on."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from checkpoints; finished runs are left.")] = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: JsonFlag = False,
) -> None:
    """Train eviction heads, and weights where the recipe says so; leaves adapters, models, loss logs and checkpoints.

    Example: [bold]nosa train experiments/train-head.yaml --texts books/ --out out/head --device cuda[/bold]
    """
    from nosa_sys.training.recipe import RECIPE_KEYS, parse_train_recipe

    data = read_yaml_mapping(recipe, RECIPE_KEYS)
    changes: dict[str, Any] = {"steps": steps, "attention": attention}
    changes = {name: value for name, value in changes.items() if value is not None}
    runs = _chosen(parse_train_recipe(data, str(recipe), changes), only, seed)
    if pack is not None:
        if out_dir is not None or resume:
            raise ConfigError("--pack trains nothing: leave out --out and --resume, or --pack")
        _check_pack(runs, pack, overwrite=overwrite)
        counts = {} if dry_run else _pack(runs, texts, pack)
        if json:
            out.print_json({"kind": "token_pack", "file": str(pack), "dry_run": dry_run, "sequences": counts})
        return
    if out_dir is None:
        raise ConfigError("--out is missing: the directory that takes a folder a run")
    _check_directories(runs, out_dir, resume=resume, overwrite=overwrite)
    planned = runs_table(recipe, runs, texts, device)
    if dry_run:
        out.stderr().print(planned)
        if json:
            out.print_json({"kind": "training", "dry_run": True, "runs": [run.to_dict() for run in runs]})
        return
    import torch

    from nosa_sys.models.load import check_device
    from nosa_sys.training.loop import SUMMARY, check_finished
    from nosa_sys.training.text_sources import open_texts

    check_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    for run in runs if resume else ():
        if (out_dir / run.directory / SUMMARY).exists():
            check_finished(run, out_dir / run.directory)
    sources = {share: open_texts(texts, share) for share in {run.held_out for run in runs}}
    out.stderr().print(planned)
    end_s = None if stop_after is None else time.monotonic() + stop_after
    done: list[dict[str, Any]] = []
    for run in runs:
        folder = out_dir / run.directory
        if resume and (folder / SUMMARY).exists():
            out.stderr().print(f"{run.directory} is finished")
            continue
        if end_s is not None and time.monotonic() >= end_s:
            done.append({"run": run.directory, "finished": False, "step": None})
            continue
        if overwrite and not resume:
            shutil.rmtree(folder, ignore_errors=True)
        left_s = None if end_s is None else end_s - time.monotonic()
        done.append({"run": run.directory, **_train(run, sources[run.held_out], folder, device, resume, left_s)})
    console = out.human(json)
    console.print(result_table(done))
    unfinished = [row["run"] for row in done if not row["finished"]]
    if unfinished:
        out.stderr().print(f"not finished: {', '.join(unfinished)}; the same command with --resume goes on")
    if json:
        out.print_json({"kind": "training", "out": str(out_dir), "runs": done})


def _check_pack(runs: list[TrainSettings], pack: Path, *, overwrite: bool) -> None:
    """Refuse a file that could not be written, or would serve two models."""
    from nosa_sys.training.text_sources import PACK_SUFFIX

    if pack.suffix != PACK_SUFFIX:
        raise ConfigError(f"--pack {pack} must end in {PACK_SUFFIX}")
    if pack.is_dir():
        raise ConfigError(f"--pack {pack} is a directory; give a file name")
    check_output(pack, overwrite=overwrite)
    if len(models := {run.model for run in runs}) > 1:
        raise ConfigError(f"one token pack serves one model, not {', '.join(sorted(models))}; use --only")


def _pack(runs: list[TrainSettings], texts: Path, pack: Path) -> dict[str, int]:
    """Write the token pack of the runs, in the tokens of their one model; sequences by tensor."""
    from nosa_sys.training.loop import open_base
    from nosa_sys.training.text_sources import DocumentTexts, write_pack
    from nosa_sys.training.texts import read_texts

    tokenizer = open_base(runs[0], "cpu").tokenizer
    counts = write_pack(pack, runs, DocumentTexts(read_texts(texts), runs[0].held_out), tokenizer)
    for name, n in counts.items():
        out.stderr().print(f"{pack}: {n} sequences {name}", markup=False)
    return counts


def _train(
    run: TrainSettings, texts: TextSource, folder: Path, device: str, resume: bool, left_s: float | None
) -> dict[str, Any]:
    from nosa_sys.training.loop import Trainer

    with out.progress(out.stderr()) as bar:
        task = bar.add_task(f"{run.directory}: loading", total=None, note="")
        trainer = Trainer(run, texts, folder, device=device, resume=resume)
        bar.update(task, description=run.directory, total=run.steps, completed=trainer.step)

        def show(row: dict[str, Any]) -> None:
            bar.update(task, completed=row["step"], note=f"loss {row['loss']:.4f}, {row['tokens_per_s']:,.0f} tok/s")

        try:
            return trainer.run(on_row=show, stop_after_s=left_s)
        except KeyboardInterrupt:
            out.stderr().print(f"the last checkpoint is in {folder}; the same command with --resume goes on")
            raise


def _chosen(runs: list[TrainSettings], only: str | None, seed: int | None) -> list[TrainSettings]:
    names = None if only is None else only.split(",")
    unknown = [name for name in names or () if name not in {run.name for run in runs}]
    if unknown:
        raise ConfigError(f"--only: no run {unknown[0]!r}; known: {', '.join(dict.fromkeys(r.name for r in runs))}")
    chosen = [run for run in runs if (names is None or run.name in names) and seed in (None, run.seed)]
    if not chosen:
        raise ConfigError(f"--seed {seed}: the recipe has seeds {', '.join(map(str, sorted({r.seed for r in runs})))}")
    return chosen


def _check_directories(runs: list[TrainSettings], out_dir: Path, *, resume: bool, overwrite: bool) -> None:
    """A run's folder may be there to be resumed or replaced only, and must be one that training made."""
    if resume and overwrite:
        raise ConfigError("--resume goes on and --overwrite starts anew; give only one")
    for run in runs:
        folder = out_dir / run.directory
        if not folder.exists() or resume:
            continue
        if not overwrite:
            raise ConfigError(f"{folder} already exists; give --resume to go on, or --overwrite to start anew")
        if not folder.is_dir() or (any(folder.iterdir()) and not (folder / "loss.jsonl").exists()):
            raise ConfigError(f"{folder} is not of a training run; choose another --out")


def runs_table(recipe: Path, runs: list[TrainSettings], texts: Path, device: str) -> Any:
    """A row a run, before it begins."""
    rows = [
        (
            run.directory,
            run.method,
            run.head,
            run.trained,
            f"k {run.sparse.topk} of {run.sparse.n_blocks(run.length)}",
            f"{run.steps} x {run.batch} x {run.length:,}",
            f"{run.steps * run.batch * run.length / 1e6:.3g} M",
        )
        for run in runs
    ]
    title = f"train {recipe} on {device}, texts {texts}"
    return out.table(title, ("run", "method", "head", "trained", "blocks", "steps x batch x tokens", "tokens"), rows)


def result_table(done: list[dict[str, Any]]) -> Any:
    """A row a run, after this session."""
    columns = ("step", "loss_last_10", "held_out_loss_first", "held_out_loss", "session_s")
    rows = [(row["run"], *(row.get(name) for name in columns)) for row in done]
    titles = ("run", "steps done", "loss, last 10", "held-out loss, first", "held-out loss, last", "seconds")
    return out.table("training, measured", titles, rows)
