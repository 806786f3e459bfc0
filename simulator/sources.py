"""Where a workload's misses come from: a trace, a table of misses, or the locality model, under any request."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from nosa_sys.errors import ConfigError
from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.simulator.host_storage import HostStorage
from nosa_sys.simulator.locality_model import (
    LocalityModel,
    ScoreModel,
    SyntheticSelections,
    synthetic_positions,
    synthetic_selections,
)
from nosa_sys.simulator.workload import (
    SequenceHistory,
    Workload,
    check_size,
    draw_loads,
    first_half_of,
    histories_of,
)
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.miss_table import MissTable
from nosa_sys.traces.policies import get_policy
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.replay import replay
from nosa_sys.traces.schema import TraceMeta


@dataclass(frozen=True)
class Request:
    """What to change about a source; None leaves it as it is there. Sizes are checked where they are used."""

    model_shape: ModelShape | None = None
    context: int | None = None
    batch: int | None = None
    steps: int | None = None
    sparse: SparseConfig | None = None
    method: str | None = None
    slots: int | None = None
    policy: str | None = None
    seed: int = 0
    storage: HostStorage | None = None

    def __post_init__(self) -> None:
        for name in ("context", "batch", "steps", "slots"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r} must be a whole number >= 1")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ConfigError(f"seed={self.seed!r} must be a whole number >= 0")
        if self.method is not None:
            get_method(self.method)
        if self.policy is not None:
            get_policy(self.policy)


class Source(Protocol):
    """Anything that turns a request into a workload."""

    def workload(self, request: Request) -> Workload: ...


def resolve_slots(sparse: SparseConfig, method: str, slots: int | None, policy: str | None) -> tuple[int, str]:
    """Defaults of the engine: slots = k; policy exact where slots = k, else lru. Dense attention has no slots."""
    if get_method(method).dense:
        return 0, policy or "exact"
    slots = sparse.topk if slots is None else slots
    return slots, policy or ("exact" if slots == sparse.topk else "lru")


@dataclass(frozen=True)
class SyntheticWorkload:
    """A workload of the locality model; nothing about it was captured.

    ``distinct_sequences`` are drawn on their own, further ones of the batch are these with time offsets.

    >>> from nosa_sys import ModelShape, SparseConfig, simulate
    >>> work = SyntheticWorkload(ModelShape.preset("nosa-1b"), SparseConfig(), context=8192, batch=8, steps=4)
    >>> simulate(work, hardware="h200-provisional").status
    'projected'
    """

    shape: ModelShape
    sparse: SparseConfig
    context: int
    batch: int = 1
    steps: int = 64
    method: str = "nosa"
    slots: int | None = None
    policy: str | None = None
    locality: ScoreModel = field(default_factory=LocalityModel)
    distinct_sequences: int = 4
    key_means_dtype: str = "float32"


class SyntheticSource:
    """Draws workloads; keeps the last selections and histories, which many requests of a sweep share."""

    def __init__(self, base: SyntheticWorkload, note: str = "") -> None:
        self._base = base
        self._note = note
        self._selections: dict[tuple[object, ...], list[SyntheticSelections]] = {}
        self._served: dict[tuple[int, int, str], SequenceHistory] = {}

    def workload(self, request: Request) -> Workload:
        base = self._base
        shape, sparse = request.model_shape or base.shape, request.sparse or base.sparse
        method = request.method or base.method
        context, batch, steps = (
            request.context or base.context,
            request.batch or base.batch,
            request.steps or base.steps,
        )
        Request(context=context, batch=batch, steps=steps, method=method)
        check_size(shape, batch, steps)
        inherits = request.sparse is None
        slots, policy = resolve_slots(
            sparse,
            method,
            request.slots or (base.slots if inherits else None),
            request.policy or (base.policy if inherits and request.slots is None else None),
        )
        n_distinct = min(batch, base.distinct_sequences)
        histories = self._histories(shape, sparse, method, context, steps, n_distinct, request.seed, slots, policy)
        loads, first_half = draw_loads(
            histories,
            shape,
            batch=batch,
            steps=steps,
            block_size=sparse.block_size,
            dense=get_method(method).dense,
            rng=np.random.default_rng([request.seed, 2]),
        )
        rules = [
            f"misses come from the locality model at {context} tokens, seed {request.seed}: " + base.locality.describe()
        ]
        if self._note:
            rules.insert(0, self._note)
        if batch > n_distinct:
            rules.append(
                f"{n_distinct} sequences are drawn, the other {batch - n_distinct} are these with time offsets"
            )
        block_bytes = shape.kv_block_bytes(sparse.block_size)
        return Workload(
            loads, shape, sparse, method, slots, policy, block_bytes, block_bytes, batch, context + steps - 1, False,
            first_half, rules=tuple(rules), key_means_dtype=base.key_means_dtype,
        ).stored_as(request.storage)  # fmt: skip

    def _histories(
        self, shape: ModelShape, sparse: SparseConfig, method: str, context: int, steps: int, n: int, seed: int,
        slots: int, policy: str,
    ) -> list[SequenceHistory]:  # fmt: skip
        if get_method(method).dense:
            return [_dense_history(shape, sparse, synthetic_positions(context, steps, seed, i)) for i in range(n)]
        key = (shape, sparse, method, context, steps, seed)
        if key not in self._selections:
            self._selections.clear()
            self._served.clear()
        drawn = self._selections.setdefault(key, [])
        for sequence in range(len(drawn), n):
            drawn.append(
                synthetic_selections(
                    shape, sparse, method, context=context, steps=steps, model=self._base.locality, seed=seed,
                    sequence=sequence,
                )
            )  # fmt: skip
        for sequence in range(n):
            if (sequence, slots, policy) not in self._served:
                self._served[sequence, slots, policy] = drawn[sequence].history(slots, policy)
        return [self._served[sequence, slots, policy] for sequence in range(n)]


def _dense_history(shape: ModelShape, sparse: SparseConfig, positions: np.ndarray) -> SequenceHistory:
    """Every block attended, none moved; no cold step has anything to load, the first is marked all the same."""
    cells = (len(positions), shape.n_layers, shape.n_kv_heads)
    n_blocks = positions // sparse.block_size + 1
    return SequenceHistory(
        positions,
        np.arange(len(positions)) == 0,
        np.zeros(cells, dtype=np.int64),
        np.broadcast_to(n_blocks[:, None, None], cells),
    )


class TableSource:
    """Misses that were counted elsewhere, with the configuration that they belong to."""

    def __init__(
        self,
        table: MissTable,
        shape: ModelShape,
        sparse: SparseConfig,
        *,
        slots: int,
        policy: str,
        device_block_bytes: int,
        exact: bool = True,
        recorded_schedule: str | None = None,
        key_means_dtype: str = "float32",
    ) -> None:
        self._table, self._shape, self._sparse = table, shape, sparse
        self._slots, self._policy = slots, policy
        self._device_block_bytes = device_block_bytes
        self._exact = exact
        self._recorded_schedule, self._key_means_dtype = recorded_schedule, key_means_dtype
        self._loads, self._first_half = table.per_layer_step(), first_half_of(table)
        self._histories: list[SequenceHistory] = []

    @property
    def own_batch(self) -> int:
        return int(self._loads.n_sequences.max(initial=0))

    @property
    def own_context(self) -> int:
        """Context of the longest sequence at its first row."""
        first = np.unique(self._table.sequence, return_index=True)[1]  # rows are sorted by step
        return int(self._table.position[first].max(initial=-1)) + 1

    def workload(self, request: Request) -> Workload:
        """The table's own situation, or another model, batch or number of steps drawn from it."""
        if request.context not in (None, self.own_context):
            raise ConfigError(
                f"context={request.context} differs from the {self.own_context} tokens of these misses; "
                "another context needs a trace or a synthetic workload"
            )
        shape = request.model_shape or self._shape
        batch, steps = request.batch or self.own_batch, request.steps or len(self._loads)
        rules = list(self._table.assumptions)
        own = shape == self._shape and batch == self.own_batch and steps == len(self._loads)
        block_bytes, device_bytes = self._table.block_bytes, self._device_block_bytes
        if own:
            loads, first_half = self._loads, self._first_half
            context = int(self._table.position.max(initial=0)) + 1
        else:
            self._histories = self._histories or histories_of(self._table)
            loads, first_half = draw_loads(
                self._histories,
                shape,
                batch=batch,
                steps=steps,
                block_size=self._sparse.block_size,
                dense=get_method(self._table.method).dense,
                rng=np.random.default_rng([request.seed, 2]),
            )
            context = int(max(h.position.max() for h in self._histories)) + 1
            rules += self._draw_rules(shape, batch, request.seed)
            if shape != self._shape:
                block_bytes = device_bytes = shape.kv_block_bytes(self._sparse.block_size)
        return Workload(
            loads, shape, self._sparse, self._table.method, self._slots, self._policy, block_bytes, device_bytes,
            batch, context, own and self._exact, first_half, self._recorded_schedule, tuple(rules),
            key_means_dtype=self._key_means_dtype,
        ).stored_as(request.storage)  # fmt: skip

    def _draw_rules(self, shape: ModelShape, batch: int, seed: int) -> list[str]:
        rules = [f"{len(self._histories)} recorded sequences side by side, warm rows start over at their end"]
        if batch > len(self._histories):
            rules.append(f"sequences beyond these are recorded ones with time offsets drawn from seed {seed}")
        if shape != self._shape:
            rules.append(
                f"layers of {shape.name} map to those of {self._shape.name} by relative depth, KV heads cyclically"
            )
        return rules


class TraceSource:
    """A trace, replayed under the budgets of the request; the last replay is kept, as many requests share it.

    With a ``locality`` only the trace's settings are used: all misses are drawn from that model.
    """

    def __init__(self, trace: Trace, locality: ScoreModel | None = None) -> None:
        self._trace = trace
        self._locality = locality
        self._key: tuple[object, ...] = ()
        self._table: TableSource | None = None
        self._drawn: SyntheticSource | None = None

    def workload(self, request: Request) -> Workload:
        """Recorded misses where nothing is changed, a replay under other budgets, the locality model elsewhere."""
        if self._locality is not None:
            if self._drawn is None:
                note = "a locality model was asked for: the trace's settings are used, its misses are not"
                self._drawn = _drawn_like(self._replayed(Request()), self._locality, note)
            return self._drawn.workload(request)
        table = self._replayed(request)
        if request.context in (None, table.own_context):
            return table.workload(request)
        if self._drawn is None:
            note = f"the trace has {table.own_context} tokens of context: its settings are used, its misses are not"
            self._drawn = _drawn_like(table, LocalityModel(), note)
        return self._drawn.workload(dataclasses.replace(request, sparse=None, method=None, slots=None, policy=None))

    def _replayed(self, request: Request) -> TableSource:
        key = (request.sparse, request.method, request.slots, request.policy)
        if self._table is None or self._key != key:
            self._key, self._table, self._drawn = key, self._replay(request), None
        return self._table

    def _replay(self, request: Request) -> TableSource:
        meta = self._trace.meta
        if (request.sparse, request.method, request.slots, request.policy) == (None, None, None, None):
            misses, sparse, slots, policy, exact = (
                MissTable.from_trace(self._trace),
                meta.sparse,
                meta.slots,
                meta.policy,
                True,
            )
        else:
            result = replay(
                self._trace, sparse=request.sparse, method=request.method, slots=request.slots, policy=request.policy
            )
            misses, sparse, slots, policy = result.misses, result.sparse, result.slots, result.policy
            exact = not result.reselected and (slots, policy) == (meta.slots, meta.policy)
        if meta.injected:
            note = "the trace's selections were injected into its run, not chosen by the model"
            misses = dataclasses.replace(misses, assumptions=[*misses.assumptions, note])
        device_block_bytes = meta.model.kv_block_bytes(sparse.block_size, meta.kv_dtype)
        narrow = meta.key_means_dtype not in ("float32", "float64")
        if narrow:
            note = f"key means of {meta.key_means_dtype} count in memory; the time of their scores is that of float32"
            misses = dataclasses.replace(misses, assumptions=[*misses.assumptions, note])
        return TableSource(
            misses,
            meta.model,
            sparse,
            slots=slots,
            policy=policy,
            device_block_bytes=device_block_bytes,
            exact=exact and not narrow and meta.status in ("measured", "validated"),
            recorded_schedule=_moved_as(meta),
            key_means_dtype="model" if narrow else "float32",
        )


def _drawn_like(table: TableSource, locality: ScoreModel, note: str) -> SyntheticSource:
    """Sequences drawn from a model in the situation of a table of misses."""
    own = table.workload(Request())
    base = SyntheticWorkload(
        own.shape,
        own.sparse,
        table.own_context,
        own.batch,
        len(own.loads),
        own.method,
        own.slots or None,
        own.policy,
        locality,
        key_means_dtype=own.key_means_dtype,
    )
    return SyntheticSource(base, note)


def _moved_as(meta: TraceMeta) -> str:
    """The schedule whose model a trace's run followed: a CPU's serial order has one operation move K and V."""
    on_cpu = meta.device.lower().startswith("cpu")
    return "fused_kv" if on_cpu and meta.schedule == "serial" else meta.schedule
