"""The training loop: AdamW on two groups, held-out loss, loss log, checkpoints, and an exact resumption."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nosa_sys.errors import ConfigError, NumericsError
from nosa_sys.machine import cpu_name, git_revision, versions
from nosa_sys.models.load import LoadedModel, load_model
from nosa_sys.training import checkpoint
from nosa_sys.training.export import ADAPTER, MODEL, check_rank, write_adapter, write_checkpoint
from nosa_sys.training.model import TrainableModel
from nosa_sys.training.recipe import TrainSettings
from nosa_sys.training.text_sources import Sequences, TextSource, TokenPack

LOSS_LOG, SUMMARY, TEXT_LIST = "loss.jsonl", "summary.json", "texts.json"
OnRow = Callable[[dict[str, Any]], None]


def learning_rate_share(step: int, settings: TrainSettings) -> float:
    """What share of the learning rates step ``step`` (0-based) uses."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.final_share + (1 - settings.final_share) * 0.5 * (1 + math.cos(math.pi * done))


class Trainer:
    """One run in ``directory``: made, or resumed from its last checkpoint with ``resume``.

    The split of ``texts`` into training and held out is the same under every seed. On CUDA the forward pass runs
    in bfloat16 autocast over fp32 weights. Raises ConfigError for settings that differ from the checkpoint's and for a
    token pack of another length or of ids beyond the model's, NumericsError for a loss that is no number.
    """

    def __init__(
        self,
        settings: TrainSettings,
        texts: TextSource,
        directory: Path,
        *,
        device: str = "cpu",
        resume: bool = False,
        loaded: LoadedModel | None = None,
    ) -> None:
        self.settings, self.directory = settings, directory
        self.loaded = loaded or open_base(settings, device)
        base = self.loaded.model
        if isinstance(texts, TokenPack):
            texts.check(settings, base.shape.vocab_size)
        self._on_gpu = base.device.type == "cuda"
        if settings.trained == "low_rank":
            check_rank(base.shape, settings.rank)
        self.model = TrainableModel(
            base,
            settings.sparse,
            method=settings.method,
            trained=settings.trained,
            rank=settings.rank,
            attention=settings.attention,
            recompute=not self._on_gpu if settings.recompute is None else settings.recompute,
            seed=settings.seed,
        )
        if self.model.has_head and settings.fresh_head:
            self.model.start_head(settings.seed)
        self._texts = texts
        self._data = texts.sequences(settings, self.loaded.tokenizer)
        groups = [
            {"params": list(group.values()), "weight_decay": decay, "lr": rate, "full_lr": rate}
            for group, rate, decay in (
                (self.model.head_parameters, settings.head_lr, 0.0),
                (self.model.weight_parameters, settings.weights_lr, settings.weight_decay),
            )
            if group
        ]
        self._optimizer = torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2), fused=self._on_gpu)
        self.step = 0
        directory.mkdir(parents=True, exist_ok=True)
        if resume:
            self._resume()
        self._start_log()

    # ---- beginning
    def _resume(self) -> None:
        saved = checkpoint.latest(self.directory)
        if saved is None:
            return
        checkpoint.check_same(saved, "settings", json.loads(json.dumps(self.settings.to_dict())))
        checkpoint.check_same(saved, "texts", self._texts.digests)
        checkpoint.restore(saved, self.model.parameters, self._optimizer)
        self._data.restore(saved.state["data"])
        self.step = saved.step

    def _start_log(self) -> None:
        """Keep the log up to the step that the run goes on from."""
        path = self.directory / LOSS_LOG
        kept = []
        if self.step and path.exists():
            kept = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= self.step]
        path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        (self.directory / TEXT_LIST).write_text(json.dumps(self._texts.names, indent=1) + "\n", encoding="utf-8")

    # ---- running
    def run(self, *, on_row: OnRow | None = None, stop_after_s: float | None = None) -> dict[str, Any]:
        """Train to the last step, or until ``stop_after_s`` seconds have passed; returns the summary, whose
        ``finished`` tells which. A run that was stopped has a checkpoint of its last step."""
        settings, start_s = self.settings, time.monotonic()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self.model.base.device)
        with (self.directory / LOSS_LOG).open("a", encoding="utf-8") as log:
            while self.step < settings.steps:
                row = self.train_step()
                if self.step % settings.evaluate_every == 0 or self.step == settings.steps:
                    row["held_out_loss"] = self.held_out_loss()
                log.write(json.dumps(row) + "\n")
                log.flush()
                if on_row is not None:
                    on_row(row)
                late = stop_after_s is not None and time.monotonic() - start_s > stop_after_s
                if late or self.step % settings.checkpoint_every == 0 or self.step == settings.steps:
                    self.save()
                if late:
                    break
        return self._finish(time.monotonic() - start_s)

    def train_step(self) -> dict[str, Any]:
        """One step; returns its row of the loss log."""
        settings, start_s = self.settings, time.perf_counter()
        share = learning_rate_share(self.step, settings)
        losses = []
        for _ in range(settings.batch):
            with self._precision():
                loss = self.model.loss(self._tensor(self._data))
            (loss / settings.batch).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        figures = {"loss": torch.stack(losses).mean()}
        for name, group in (("head", self.model.head_parameters), ("weights", self.model.weight_parameters)):
            if group:
                norm = torch.nn.utils.clip_grad_norm_(group.values(), settings.clip)
                figures[f"{name}_gradient_norm"] = norm
        for group in self._optimizer.param_groups:
            group["lr"] = group["full_lr"] * share
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        # a GPU is waited for here, once a step; a run that fails leaves its last checkpoint as it was
        values = torch.stack([figure.double() for figure in figures.values()]).tolist()
        self.model.check_selections()
        row = {"step": self.step, **dict(zip(figures, values, strict=True))}
        if not math.isfinite(row["loss"]):
            raise NumericsError(f"the loss of step {self.step} is {row['loss']}; lower the learning rates")
        time_s = time.perf_counter() - start_s
        tokens = settings.batch * settings.length
        return {**row, "lr_share": share, "tokens": self.step * tokens, "tokens_per_s": tokens / time_s}

    def _tensor(self, data: Sequences) -> Tensor:
        return torch.from_numpy(data.next()).to(self.model.base.device)

    def _precision(self) -> AbstractContextManager[Any]:
        kind = self.model.base.device.type
        return torch.autocast(kind, dtype=torch.bfloat16) if kind == "cuda" else nullcontext()

    @torch.no_grad()
    def held_out_loss(self) -> float | None:
        """Mean next-token loss of the first held-out sequences, the same ones under every seed; None without any."""
        if not self._n_texts(held_out=True) or not self.settings.held_out_sequences:
            return None
        data = self._texts.sequences(self.settings, self.loaded.tokenizer, held_out=True)
        losses = []
        for _ in range(self.settings.held_out_sequences):
            with self._precision():
                losses.append(self.model.loss(self._tensor(data)))
        self.model.check_selections()
        return float(torch.stack(losses).mean())

    def _n_texts(self, *, held_out: bool) -> int:
        return sum(entry["held_out"] == held_out for entry in self._texts.names)

    def save(self) -> Path:
        """Write a checkpoint of the present step."""
        state = {"settings": self.settings.to_dict(), "texts": self._texts.digests, "data": self._data.state()}
        return checkpoint.save(self.directory, self.step, self.model.parameters, self._optimizer, state)

    # ---- the end
    def _finish(self, time_s: float) -> dict[str, Any]:
        device = self.model.base.device
        rows = [json.loads(line) for line in (self.directory / LOSS_LOG).read_text().splitlines()]
        held_out = [row["held_out_loss"] for row in rows if row.get("held_out_loss") is not None]
        document = {
            "kind": "training",
            "finished": self.step == self.settings.steps,
            "settings": self.settings.to_dict(),
            "step": self.step,
            "tokens": self.step * self.settings.batch * self.settings.length,
            "loss_last_10": sum(row["loss"] for row in rows[-10:]) / len(rows[-10:]),
            "held_out_loss_first": held_out[0] if held_out else None,
            "held_out_loss": held_out[-1] if held_out else None,
            "session_s": time_s,
            "peak_gpu_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
            "texts": {
                "training": self._n_texts(held_out=False),
                "held_out": self._n_texts(held_out=True),
                **self._texts.digests,
            },
            "versions": versions(),
            "git_revision": git_revision(),
            "notes": self.loaded.notes,
        }
        if document["finished"]:
            self._export(document)
            (self.directory / SUMMARY).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return document

    def _export(self, document: dict[str, Any]) -> None:
        settings = self.settings
        held_out = document["held_out_loss"]
        score = "" if held_out is None else f", held-out loss {held_out:.4f}"
        record = {
            "label": f"{settings.name}: {settings.trained} trained for {self.step} steps of "
            f"{settings.batch * settings.length} tokens, seed {settings.seed}{score}",
            "base_model": self.loaded.source,
            "settings": {**document["settings"], "rope_theta": self.loaded.model.config.rope_theta},  # for load_model
            **{key: document[key] for key in ("tokens", "held_out_loss", "texts", "versions")},
        }
        if settings.trained == "all":
            write_checkpoint(self.directory / MODEL, self.model.engine_model(), self.loaded.tokenizer)
            document["model"] = MODEL
        if write_adapter(self.directory, self.model, record) is not None and settings.trained != "all":
            document["adapter"] = ADAPTER


def check_finished(settings: TrainSettings, directory: Path) -> None:
    """ConfigError where the run that was finished in ``directory`` had other settings, naming the first, or left a
    summary that cannot be read."""
    path, mine = directory / SUMMARY, json.loads(json.dumps(settings.to_dict()))
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))["settings"]
        shared = [name for name in mine if name in theirs]
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{path} is no summary of a training run; remove {directory} to train it anew") from None
    differing = [name for name in shared if mine[name] != theirs[name]]
    if differing:
        name = differing[0]
        raise ConfigError(
            f"{path} was made with {name}={theirs[name]!r}, this run has {mine[name]!r}; use the same recipe, or "
            f"remove {directory} to train it anew"
        )


def open_base(settings: TrainSettings, device: str) -> LoadedModel:
    """The model that a run starts from, in fp32."""
    fresh = settings.fresh_head and settings.head != "none" and settings.adapter is None
    return load_model(
        settings.model,
        dtype="float32",
        device=device,
        head=settings.head,
        adapter=settings.adapter,
        convert_dense=fresh,
        rope_theta=settings.rope_theta,
    )
