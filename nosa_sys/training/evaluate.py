"""Evaluation: every subject in every cell on the same documents; rows with misses and bytes beside each score."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nosa_sys.engine.sampling import SamplingParams
from nosa_sys.errors import ConfigError
from nosa_sys.experiments.equal_bytes import full_kv_bytes, kept_bytes
from nosa_sys.methods import get_method
from nosa_sys.models.load import LoadedModel, load_model
from nosa_sys.slot_count import slots_of
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.training.decoding import Request, decode, distinct_share, first_difference
from nosa_sys.training.evaluation_settings import EvalSettings, Subject
from nosa_sys.training.scoring import Counts, DocumentScore, score_document
from nosa_sys.training.tasks import NEEDLES, Case, make_case
from nosa_sys.training.texts import Document, excerpts

Progress = Callable[[str, int, int], None]
Row = dict[str, Any]


@dataclass(frozen=True)
class _Cell:
    """One subject in one cell."""

    subject: Subject
    loaded: LoadedModel
    context: int
    asked: SparseConfig
    sparse: SparseConfig
    slots: int
    hot_slots: int  # LRU slots whose misses are counted beside those of k slots; 0: not counted

    def columns(self) -> Row:
        """What every row of the cell begins with. ``budget_k`` names the cell, ``topk`` is the subject's own k."""
        shape, method = self.loaded.model.shape, get_method(self.subject.method)
        kept = kept_bytes(shape, self.sparse, method, slots=self.slots, context=self.context, offload=not method.dense)
        return {
            "subject": self.subject.name,
            "method": method.name,
            "head": self.loaded.model.head,
            "context": self.context,
            "budget_k": self.asked.topk,
            "topk": None if method.dense else self.sparse.topk,
            "block_size": self.sparse.block_size,
            "select_blocks": None if method.dense else self.sparse.select_blocks,
            "slots": None if method.dense else self.slots,
            "hot_slots": None if method.dense or not self.hot_slots else self.hot_slots,
            "gpu_bytes": kept.total_bytes,
            "full_kv_bytes": full_kv_bytes(shape, self.sparse, self.context),
        }


class Evaluation:
    """Runs ``settings`` over ``documents``; ``rows`` fill as it goes, one a document (and bucket), case or generation.

    Documents are cut from a seeded place to the longest context, the same for every subject, and shorter contexts are
    their beginnings. Raises ConfigError when too few are long enough.
    """

    def __init__(
        self, settings: EvalSettings, documents: Sequence[Document], *, device: str = "cpu", progress: Progress
    ) -> None:
        self.settings, self._device, self._progress = settings, device, progress
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self._loaded: tuple[Subject, LoadedModel] | None = None
        self._baseline = self._load(settings.ordered_subjects[0])
        self._documents = documents
        self._cut: list[tuple[Document, list[int]]] = self._cut_documents()
        self._cases: dict[int, list[tuple[str, Case]]] = {}
        self.written: dict[str, list[int]] = {}  # what the baseline generated, by k and document

    def run(self) -> list[Row]:
        """All rows."""
        for subject in self.settings.ordered_subjects:
            self.run_subject(subject)
        return self.rows

    def run_subject(self, subject: Subject) -> list[Row]:
        """Rows of one subject. Where something is generated the baseline has its turn first, or its ``written`` is set
        from a session before; ConfigError otherwise."""
        settings, n_before = self.settings, len(self.rows)
        is_baseline = subject.name == settings.baseline_name
        if settings.generation_documents and not is_baseline and not self.written:
            raise ConfigError(
                f"subject {subject.name} reads what {settings.baseline_name} generates; run that one first"
            )
        loaded = self._baseline if is_baseline else self._load(subject)
        if loaded.model.shape.vocab_size != self._baseline.model.shape.vocab_size:
            raise ConfigError(f"subject {subject.name} has another vocabulary than {settings.baseline_name}")
        for context, asked in settings.cells():
            cell = self._cell(subject, loaded, context, asked)
            self._score(cell)
            if settings.cases and settings.tasks:
                self._retrieve(cell)
        if settings.generation_documents:
            for asked in settings.budgets():
                context = settings.generation_prompt + settings.generation_tokens
                self._generate(self._cell(subject, loaded, context, asked))
        return self.rows[n_before:]

    def _cell(self, subject: Subject, loaded: LoadedModel, context: int, asked: SparseConfig) -> _Cell:
        settings = self.settings
        sparse = settings.budget_of(subject, asked, context, loaded.model.shape)
        if context <= sparse.topk_tokens and not get_method(subject.method).dense:
            self.notes.append(
                f"{subject.name}, {context}: no step is sparse, k = {sparse.topk} blocks of {sparse.block_size} tokens "
                "hold the whole context"
            )
        hot_slots = slots_of(settings.hot_slots, sparse.topk) if settings.hot_slots else 0
        return _Cell(subject, loaded, context, asked, sparse, slots_of(settings.slots, sparse.topk), hot_slots)

    def _load(self, subject: Subject) -> LoadedModel:
        """Its model; that of the subject before serves again where only budgets or methods differ."""
        weights = dataclasses.replace(subject, name="any", method="full", sparse=None)
        if self._loaded is not None and self._loaded[0] == weights:
            return self._loaded[1]
        self._progress(f"loading {subject.name}", 0, 0)
        default = "bfloat16" if self._device.startswith("cuda") else "float32"
        loaded = load_model(
            subject.model,
            dtype=self.settings.dtype or default,
            device=self._device,
            head=subject.head,
            adapter=subject.adapter,
            convert_dense=subject.convert_dense,
            rope_theta=subject.rope_theta,
        )
        self.notes += [f"{subject.name}: {note}" for note in loaded.notes]
        self._loaded = weights, loaded
        return loaded

    # ---- documents
    def _cut_documents(self) -> list[tuple[Document, list[int]]]:
        settings = self.settings
        needed = max(settings.documents, settings.generation_documents, settings.cases if settings.tasks else 0)
        length = max([*settings.contexts, settings.generation_prompt if settings.generation_documents else 0])
        return excerpts(
            self._documents,
            self._baseline.tokenizer,
            length=length,
            count=needed,
            seed=settings.seed,
            on_found=lambda n: self._progress("reading documents", n, needed),
        )

    # ---- perplexity, misses, gamma, dense mass, recall
    def _score(self, cell: _Cell) -> None:
        n = self.settings.documents
        for index, (document, tokens) in enumerate(self._cut[:n]):
            self._progress(f"{cell.subject.name}, {cell.context}: documents", index, n)
            score = score_document(
                cell.loaded.model,
                tokens[: cell.context],
                cell.sparse,
                method=cell.subject.method,
                mass_positions=self.settings.mass_positions,
                hot_slots=cell.hot_slots,
                seed=self.settings.seed + index,
            )
            for first, last, name in self._buckets(len(score.loss)):
                part = self._score_columns(cell, score, first, last)
                self.rows.append(
                    {"kind": "perplexity", **cell.columns(), "document": document.name, "part": name, **part}
                )

    def _buckets(self, n: int) -> list[tuple[int, int, str]]:
        """(first, end, name): equal parts of the positions, then all of them, then their second half."""
        edges = np.linspace(0, n, self.settings.buckets + 1).astype(int).tolist()
        parts = [(first, end, f"{first}-{end - 1}") for first, end in itertools.pairwise(edges) if end > first]
        return [*parts, (0, n, "all"), (n // 2, n, "second half")]

    @staticmethod
    def _score_columns(cell: _Cell, score: DocumentScore, first: int, end: int) -> Row:
        shape = cell.loaded.model.shape
        heads, block_bytes = shape.n_layers * shape.n_kv_heads, shape.kv_block_bytes(cell.sparse.block_size)
        part, warm = slice(first, end), slice(max(1, first), end)  # a step is warm when there is one before it
        kept, selected = score.kept[warm], score.selected[warm]
        some = selected > 0  # every head of a step selects equally many blocks, so a step's ratio is its heads' mean

        def moved(name: str, misses: Counts | None) -> Row:
            mean = None if misses is None or not len(kept) else float(misses[warm].mean()) / heads
            bytes_a_step = None if mean is None else mean * heads * block_bytes
            return {f"{name}misses_per_head_step": mean, f"{name}h2d_bytes_per_step": bytes_a_step}

        return {
            "loss_sum": float(score.loss[part].sum()),
            "n_tokens": end - first,
            "matches": int(score.matches[part].sum()),
            **moved("", score.misses),
            **moved("hot_", score.hot_misses),
            "gamma_weighted": float(kept.sum()) / int(selected.sum()) if some.any() else None,
            "gamma_macro": float((kept[some] / selected[some]).mean()) if some.any() else None,
            "dense_mass": score.dense_mass,
            "recall": score.recall,
        }

    # ---- retrieval
    def _retrieve(self, cell: _Cell) -> None:
        cases = self._cases_of(cell.context)
        requests = [Request(case.prompt, case.max_new_tokens, SamplingParams()) for _, case in cases]
        tokenizer = self._baseline.tokenizer
        done = self._decode(cell, requests, "retrieval", tokenizer.eos_ids)
        for (name, case), tokens in zip(cases, done.tokens, strict=True):
            text = tokenizer.decode(tokens)
            self.rows.append(
                {
                    "kind": "task", **cell.columns(), "document": name, "task": case.kind, "depth": case.depth,
                    "score": case.score(text), "generated": text, "answers": ", ".join(case.answers),
                    "misses_per_head_step": done.misses_per_head_step, "h2d_bytes_per_step": done.h2d_bytes_per_step,
                }
            )  # fmt: skip

    def _cases_of(self, context: int) -> list[tuple[str, Case]]:
        """(document, case) of every retrieval task, the same for all subjects."""
        if context not in self._cases:
            settings, made = self.settings, []
            for number, kind in enumerate(settings.tasks):
                for index in range(settings.cases):
                    document = self._cut[index % len(self._cut)][0]
                    for depth_index, depth in enumerate(settings.depths if kind in NEEDLES else (0.5,)):
                        seed = (settings.seed, number, index, depth_index)
                        tokenizer = self._baseline.tokenizer
                        case = make_case(kind, context, tokenizer, document.text, depth=depth, seed=seed)
                        made.append((document.name, case))
            self._cases[context] = made
        return self._cases[context]

    def _decode(self, cell: _Cell, requests: list[Request], what: str, eos_ids: Sequence[int] = ()) -> Any:
        total, done = sum(request.max_new_tokens for request in requests), 0

        def count(n: int) -> None:
            nonlocal done
            done += n
            self._progress(f"{cell.subject.name}, {cell.context}: {what}", done, total)

        count(0)
        return decode(
            cell.loaded.model,
            requests,
            cell.sparse,
            method=cell.subject.method,
            slots=cell.slots,
            max_batch=self.settings.batch,
            eos_ids=eos_ids,
            on_tokens=count,
        )

    # ---- long generation
    def _generate(self, cell: _Cell) -> None:
        """The subject goes on from each document; the baseline's dense model reads what it wrote, and the subject reads
        what the baseline wrote."""
        settings = self.settings
        prompt_tokens, n_new = settings.generation_prompt, settings.generation_tokens
        documents = self._cut[: settings.generation_documents]
        requests = [
            Request(
                tokens[:prompt_tokens],
                n_new,
                SamplingParams(settings.temperature, settings.top_p, settings.seed + index),
            )
            for index, (_, tokens) in enumerate(documents)
        ]
        done = self._decode(cell, requests, "generation")
        for index, ((document, tokens), written) in enumerate(zip(documents, done.tokens, strict=True)):
            key = f"k{cell.asked.topk}.{index}"
            if cell.subject.name == settings.baseline_name:
                self.written[key] = written
            theirs = self.written[key]
            prompt = tokens[:prompt_tokens]
            own = score_document(self._baseline.model, [*prompt, *written], cell.sparse, method="full")
            read = score_document(cell.loaded.model, [*prompt, *theirs], cell.sparse, method=cell.subject.method)
            for first, end, name in self._buckets(n_new):
                part = slice(prompt_tokens - 1 + first, prompt_tokens - 1 + end)
                self.rows.append(
                    {
                        "kind": "generation", **cell.columns(), "document": document.name, "part": name,
                        "n_tokens": end - first, "dense_loss_sum": float(own.loss[part].sum()),
                        "baseline_text_loss_sum": float(read.loss[part].sum()),
                        "agreement_with_baseline": float(read.matches[part].mean()),
                        "distinct_4_grams": distinct_share(written[first:end]),
                        "first_difference": first_difference(written, theirs),
                        "misses_per_head_step": done.misses_per_head_step,
                        "h2d_bytes_per_step": done.h2d_bytes_per_step, "d2h_bytes_per_step": done.d2h_bytes_per_step,
                    }
                )  # fmt: skip
