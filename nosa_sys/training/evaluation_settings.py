"""Evaluation recipes: what is compared, on what, under which budgets; and budgets of equal GPU bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nosa_sys.errors import CapacityError, ConfigError
from nosa_sys.experiments.equal_bytes import kept_bytes
from nosa_sys.methods import HEADS, get_method
from nosa_sys.model_shape import DTYPE_BYTES, ModelShape
from nosa_sys.models import smollm2
from nosa_sys.slot_count import GPU_SLOT_FACTOR, slots_of
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.training.recipe import build, check_name, check_ranges
from nosa_sys.training.tasks import TASKS

BUDGETS = ("blocks", "bytes")


@dataclass(frozen=True)
class Subject:
    """One model under one method. ``sparse`` replaces the recipe's budgets (then ``topks`` do not vary it)."""

    name: str
    model: str = smollm2.NAME
    adapter: str | None = None
    method: str = "nosa"
    head: str = "ed_dma"
    rope_theta: float | None = None
    convert_dense: bool = False
    sparse: SparseConfig | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        get_method(self.method)
        if self.head not in HEADS:
            raise ConfigError(f"head={self.head!r} must be one of {', '.join(HEADS)}")


@dataclass(frozen=True)
class EvalSettings:
    """One evaluation.

    Every subject runs in every cell: a context of ``contexts`` and a k of ``topks`` (default: that of ``sparse``; the
    ratios window/k and select/k are kept). ``budget`` blocks gives each method the same k; bytes gives each the largest
    k whose slots, compressed keys and betas fit into what NOSA keeps on the GPU. ``slots`` is a multiple of k; so is
    ``hot_slots``, LRU slots whose misses are counted beside those of k slots over each document (0: not counted).
    ``baseline`` (default: the first subject) is what others are held against, and its model reads what they generate.
    Zero ``documents``, ``cases`` or ``generation_documents`` leaves that part out.
    """

    name: str
    subjects: tuple[Subject, ...]
    description: str = ""
    baseline: str | None = None
    sparse: SparseConfig = field(default_factory=SparseConfig)
    topks: tuple[int, ...] = ()
    contexts: tuple[int, ...] = (8192,)
    budget: str = "blocks"
    slots: float = 1.0
    hot_slots: float = GPU_SLOT_FACTOR
    dtype: str | None = None
    batch: int = 4
    seed: int = 0
    documents: int = 16
    buckets: int = 4
    mass_positions: int = 64
    tasks: tuple[str, ...] = TASKS
    cases: int = 4
    depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    generation_documents: int = 4
    generation_prompt: int = 4096
    generation_tokens: int = 2048
    temperature: float = 1.0
    top_p: float = 0.95

    def __post_init__(self) -> None:
        check_name(self.name)
        names = [subject.name for subject in self.subjects]
        if not names or len(set(names)) < len(names):
            raise ConfigError("subjects must be one or more of different names")
        if self.baseline is not None and self.baseline not in names:
            raise ConfigError(f"baseline={self.baseline!r} must be one of the subjects {', '.join(names)}")
        if self.budget not in BUDGETS:
            raise ConfigError(f"budget={self.budget!r} must be one of {', '.join(BUDGETS)}")
        if self.dtype is not None and self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype={self.dtype!r} must be one of {', '.join(DTYPE_BYTES)}")
        unknown = [task for task in self.tasks if task not in TASKS]
        if unknown:
            raise ConfigError(f"unknown task {unknown[0]!r}; known: {', '.join(TASKS)}")
        if not self.contexts or min(self.contexts) < 2:
            raise ConfigError(f"contexts={list(self.contexts)} must be one or more of at least 2 tokens")
        for key in ("contexts", "topks", "tasks", "depths"):
            if len(set(getattr(self, key))) < len(getattr(self, key)):
                raise ConfigError(f"{key}={list(getattr(self, key))} must name each value once")
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise ConfigError(f"depths={list(self.depths)} must lie in [0, 1]")
        if self.buckets > min(self.contexts) - 1:
            raise ConfigError(f"buckets={self.buckets} exceed the {min(self.contexts) - 1} predictions of a context")
        if not (self.documents or self.generation_documents or (self.cases and self.tasks)):
            raise ConfigError("nothing to do: documents, cases and generation_documents are all 0")
        if 0 < self.hot_slots < 1:
            raise ConfigError(f"hot_slots={self.hot_slots} must be a multiple of k >= 1, or 0 to leave it out")
        check_ranges(self, slots=1, hot_slots=0, batch=1, seed=0, documents=0, buckets=1, mass_positions=0, cases=0)
        check_ranges(self, generation_documents=0, generation_prompt=1, generation_tokens=1, temperature=0)

    @property
    def baseline_name(self) -> str:
        return self.baseline or self.subjects[0].name

    @property
    def ordered_subjects(self) -> list[Subject]:
        """The baseline first."""
        return sorted(self.subjects, key=lambda subject: subject.name != self.baseline_name)

    def refuse_missing_files(self) -> None:
        """ConfigError naming every adapter and model of a subject that is not there."""
        paths = [subject.adapter for subject in self.subjects if subject.adapter is not None]
        missing = [path for path in paths if not Path(path).is_file()]
        models = [subject.model for subject in self.subjects if subject.model != smollm2.NAME]
        missing += [path for path in models if not Path(path).exists()]
        if missing:
            raise ConfigError(
                f"{self.name}: not there: {', '.join(dict.fromkeys(missing))}; nosa train makes adapters and models "
                "(experiments/train-NAME.yaml with --out out/train-NAME), or choose other subjects with --only"
            )

    def budgets(self) -> list[SparseConfig]:
        """The budgets asked for, one a k."""
        return [self.sparse.with_topk(k) for k in self.topks] or [self.sparse]

    def cells(self) -> list[tuple[int, SparseConfig]]:
        """(context, budgets) of every cell."""
        return [(context, sparse) for context in self.contexts for sparse in self.budgets()]

    def budget_of(self, subject: Subject, sparse: SparseConfig, context: int, shape: ModelShape) -> SparseConfig:
        """The subject's own budgets in a cell."""
        chosen = subject.sparse or sparse
        if self.budget == "bytes" and not get_method(subject.method).dense:
            limit = kept_bytes(
                shape, sparse, "nosa", slots=slots_of(self.slots, sparse.topk), context=context, offload=True
            )
            chosen = largest_budget(
                shape, chosen, subject.method, ratio=self.slots, context=context, gpu_bytes=limit.total_bytes
            )
        get_method(subject.method).check(chosen)
        return chosen


def parse_eval_recipe(data: Mapping[str, Any], source: str) -> EvalSettings:
    """A recipe's mapping as settings; ConfigError names the key at fault."""
    subjects = data.get("subjects")
    if not isinstance(subjects, list) or not all(isinstance(subject, dict) for subject in subjects):
        raise ConfigError(f"{source}: subjects must be a list of mappings, one a model and method")
    built = [build(Subject, subject, f"{source}: subjects") for subject in subjects]
    return build(EvalSettings, {**data, "subjects": built}, source)


EVAL_KEYS = tuple(entry.name for entry in dataclasses.fields(EvalSettings))


def largest_budget(
    shape: ModelShape, sparse: SparseConfig, method: str, *, ratio: float, context: int, gpu_bytes: int
) -> SparseConfig:
    """``sparse`` with the largest k, at most all blocks, that keeps at most ``gpu_bytes`` of a sequence on the GPU.

    Sinks, window and query-aware share stay. Raises CapacityError when not even the smallest k fits.
    """
    lowest = max(sparse.n_forced, sparse.query_budget)
    for topk in range(max(lowest, sparse.n_blocks(context)), lowest - 1, -1):
        kept = kept_bytes(shape, sparse, method, slots=slots_of(ratio, topk), context=context, offload=True)
        if kept.total_bytes <= gpu_bytes:
            return dataclasses.replace(sparse, topk=topk)
    raise CapacityError(
        f"method {method} cannot keep {lowest} blocks in {gpu_bytes} bytes of GPU memory a sequence; "
        "give a smaller window or select_blocks"
    )
