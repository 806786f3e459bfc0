"""Engine: continuous batch decoding with NOSA attention and KV offload (arXiv 2510.13602, sections 3 and 4)."""

from __future__ import annotations

import copy
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from torch import Tensor

from nosa_sys.engine.decode import DecodeRunner
from nosa_sys.engine.memory import Memory
from nosa_sys.engine.metrics import RunMetrics, StepCount
from nosa_sys.engine.plan import StepBatch, StepPlan, make_batch
from nosa_sys.engine.policies import get_policy
from nosa_sys.engine.prefill import PrefillRunner
from nosa_sys.engine.recorder import Recorder
from nosa_sys.engine.sampling import SamplingParams, sample
from nosa_sys.engine.schedules import get_schedule
from nosa_sys.engine.sequence import Request, SequenceState, TokenEvent, prompt_sha256
from nosa_sys.engine.sequence import Sequence as LiveSequence
from nosa_sys.errors import CapacityError, ConfigError, NosaError, NumericsError
from nosa_sys.methods import get_method
from nosa_sys.models.llama import LlamaModel
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.schema import SequenceInfo, TraceMeta

GREEDY = SamplingParams()


class Engine:
    """Decodes a batch of sequences of unequal lengths; sequences join and leave between steps.

    A step first admits and prefills waiting sequences (all of a prompt but its last token), then runs one decode step
    over all running ones. Storage grows with generation; with ``host_memory_bytes`` a sequence that can never fit is
    refused when it is added, and one that cannot fit yet waits.

    Args:
        slots: device blocks per (layer, sequence, KV head), the current block included; default k.
        policy: which blocks stay beyond the selection: exact (none), lru or beta; default exact where slots = k.
        host_kv_dtype: must be the model's dtype for now.
        prefill_chunk: prompt tokens per prefill pass.
        record_scores: keep stage-1 scores and beta means in the trace, for replay under other budgets.
        on_prefill: called with the number of prompt tokens of each finished prefill chunk, for progress bars.
        poison: value (NaN in tests) put into all memory that holds nothing, so that reading it shows.

    Raises ConfigError for unknown names, CapacityError for fewer slots than k.

    >>> from nosa_sys.model_shape import ModelShape
    >>> from nosa_sys.models.random import random_model
    >>> model = random_model(ModelShape("tiny", 2, 4, 2, 16, 32, 64, 100, dtype="float32"), seed=1)
    >>> engine = Engine(model, SparseConfig(topk=8, window_size=128, select_blocks=2))
    >>> first = engine.add([1, 2, 3], max_new_tokens=4)
    >>> second = engine.add([5] * 40, max_new_tokens=2, sampling=SamplingParams(temperature=1.0, seed=7))
    >>> outputs = engine.run()
    >>> len(outputs[first]), len(outputs[second])
    (4, 2)
    """

    def __init__(
        self,
        model: LlamaModel,
        sparse: SparseConfig,
        *,
        method: str = "nosa",
        schedule: str = "serial",
        slots: int | None = None,
        policy: str | None = None,
        host_kv_dtype: str | None = None,
        prefill_chunk: int = 512,
        max_batch: int = 8,
        host_memory_bytes: int | None = None,
        recorder: Recorder | None = None,
        record_scores: bool = False,
        poison: float | None = None,
        on_prefill: Callable[[int], None] | None = None,
    ) -> None:
        self.model, self.sparse = model, sparse
        self.method = get_method(method)
        self.method.check(sparse)
        self.slots = _resolve_slots(slots, sparse, self.method.dense)
        if policy is None:
            policy = "exact" if self.slots <= sparse.topk else "lru"
        self.policy, self.schedule = get_policy(policy), get_schedule(schedule)
        for name, value in (("prefill_chunk", prefill_chunk), ("max_batch", max_batch)):
            if value < 1:
                raise ConfigError(f"{name}={value} must be >= 1")
        if host_memory_bytes is not None and host_memory_bytes < 1:
            raise ConfigError(f"host_memory_bytes={host_memory_bytes} must be >= 1; leave it out for no limit")
        if host_kv_dtype not in (None, model.shape.dtype):
            raise ConfigError(f"host_kv_dtype={host_kv_dtype!r} must equal the model's dtype {model.shape.dtype!r}")
        self.max_batch = max_batch
        self.memory = Memory(
            model,
            sparse,
            self.method,
            n_slots=self.slots,
            offload=not self.method.dense,
            host_memory_bytes=host_memory_bytes,
            poison=poison,
        )
        self._prefill = PrefillRunner(model, self.memory, prefill_chunk, on_prefill)
        self._decode = DecodeRunner(model, self.memory, self.policy, self.schedule, record_scores=record_scores)
        self._record_scores = record_scores
        self._waiting: deque[LiveSequence] = deque()
        self._running: list[LiveSequence] = []
        self._free_lanes = list(range(max_batch))
        self._next_id = self._next_step = 0
        self._torn = False
        self._step_end_s: float | None = None
        self._metrics = RunMetrics(self.memory.block_bytes)
        self.outputs: dict[int, list[int]] = {}
        self.last_plan: StepPlan | None = None
        self.last_logits: Tensor | None = None
        self._recorder = recorder
        if recorder is not None:
            recorder.start(self._trace_meta(), self.method.dense)

    # ---- asking for work
    def add(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: SamplingParams = GREEDY,
        eos_ids: Iterable[int] = (),
        force_tokens: Sequence[int] | None = None,
    ) -> int:
        """Queue a prompt of token ids; returns the sequence id (never reused).

        ``force_tokens`` replace the first new tokens, whatever the model says. Raises ConfigError for ids outside the
        vocabulary or an empty prompt, CapacityError when host_memory_bytes can never hold the sequence.
        """
        try:
            prompt = [operator.index(t) for t in prompt]
            forced = tuple(operator.index(t) for t in (() if force_tokens is None else force_tokens))
        except TypeError:
            raise ConfigError("prompt and force_tokens must be token ids, whole numbers") from None
        if not prompt:
            raise ConfigError("the prompt is empty; give at least one token (a BOS token will do)")
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={max_new_tokens} must be >= 1")
        for name, tokens in (("prompt", prompt), ("force_tokens", forced)):
            bad = [t for t in tokens if not 0 <= t < self.model.shape.vocab_size]
            if bad:
                raise ConfigError(
                    f"{name}: token {bad[0]} is outside the vocabulary 0..{self.model.shape.vocab_size - 1}"
                )
        request = Request(len(prompt), max_new_tokens, sampling, frozenset(eos_ids), forced)
        return self._enqueue(LiveSequence(self._next_id, request, prompt, sampling.generator()))

    def _enqueue(self, sequence: LiveSequence) -> int:
        sequence.reserved_pages = self.memory.pages_for(sequence.max_stored_tokens)
        self.memory.pool.refuse_oversized(sequence.reserved_pages)
        self._next_id += 1
        self._waiting.append(sequence)
        self._metrics.add(sequence.id, sequence.request.prompt_tokens, time.perf_counter())
        self.outputs[sequence.id] = sequence.tokens[sequence.request.prompt_tokens :]
        return sequence.id

    def cancel(self, sequence_id: int) -> None:
        """Drop a waiting or running sequence; its tokens so far stay in ``outputs``. ConfigError if it is neither."""
        sequence = self._find(sequence_id)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            self._leave(sequence)

    def save(self, sequence_id: int) -> SequenceState:
        """Copy a waiting or running sequence with its KV; it goes on itself. ConfigError if it is neither."""
        sequence = self._find(sequence_id)
        kv = sequence.restored
        if sequence.lane >= 0:
            kv = self.memory.save(sequence.lane, sequence.pages, sequence.n_cached)
        return SequenceState(
            request=sequence.request,
            tokens=tuple(sequence.tokens),
            n_generated=sequence.n_generated,
            generator_state=copy.deepcopy(dict(sequence.generator.bit_generator.state)),
            settings=self._settings(),
            kv=kv,
        )

    def resume(self, state: SequenceState) -> int:
        """Queue a saved sequence under a new id; it goes on as if never interrupted, its first step being cold.

        ConfigError when the model or the selection settings differ (slots and policy may).
        """
        mine = self._settings()
        for name, value in state.settings.items():
            if mine[name] != value:
                raise ConfigError(
                    f"the saved sequence has {name}={value}, this engine {mine[name]}; use equal settings"
                )
        generator = state.request.sampling.generator()
        generator.bit_generator.state = copy.deepcopy(state.generator_state)
        sequence = LiveSequence(
            self._next_id, state.request, list(state.tokens), generator, state.n_generated, restored=state.kv
        )
        return self._enqueue(sequence)

    # ---- running
    @property
    def idle(self) -> bool:
        return not (self._waiting or self._running)

    def stream(self) -> Iterator[TokenEvent]:
        """Step until nothing is left to do, yielding tokens as they come."""
        while not self.idle:
            yield from self.step()

    def run(self) -> dict[int, list[int]]:
        """Step until nothing is left to do; new tokens of every sequence ever added, by id."""
        for _ in self.stream():
            pass
        return self.outputs

    def step(self) -> list[TokenEvent]:
        """Admit what fits, then decode one token of each running sequence; their events in admission order.

        After a NumericsError the named sequence can be cancelled and the others go on. Anything else that stops a
        step half-way (an interrupt, a full disk) may leave blocks marked resident that never arrived: later calls
        raise NosaError.
        """
        if self._torn:
            raise NosaError("an earlier step was stopped half-way; save the sequences and resume them in a new engine")
        n_joined = self._admit()
        if not self._running:
            return []
        if n_joined or self._step_end_s is None:
            self._step_end_s = time.perf_counter()
        self._torn = True
        try:
            events = self._decode_batch(self._running)
        except NumericsError:
            self._torn = False
            raise
        self._torn = False
        return events

    def _decode_batch(self, batch: list[LiveSequence]) -> list[TokenEvent]:
        self._make_room(batch)
        rows = make_batch(
            self._next_step,
            [s.id for s in batch],
            [s.lane for s in batch],
            [s.n_cached for s in batch],
            [s.cold for s in batch],
            self.sparse,
            self.method,
            offload=self.memory.offload,
        )
        logits, plan = self._decode.step(rows, [s.tokens[s.n_cached] for s in batch])
        self._refuse_nan(logits, rows)
        sampled = sample(logits, [s.request.sampling for s in batch], [s.generator for s in batch])
        now = time.perf_counter()
        self._next_step += 1
        self.last_plan, self.last_logits = plan, logits
        # from the end of the step before: what recording and the caller did in between is part of the rate
        self._metrics.step(_count(plan), now - (self._step_end_s or now))
        self._step_end_s = now
        if self._recorder is not None:
            self._recorder.on_step(plan)
        events = []
        for sequence, token in zip(list(batch), sampled, strict=True):
            sequence.n_cached += 1
            sequence.cold = False
            event = sequence.accept(token)
            self.outputs[sequence.id].append(event.token)
            self._metrics.token(sequence.id, now)
            events.append(event)
            if event.finished:
                self._leave(sequence)
        if not self._running:
            self._step_end_s = None
        return events

    def _admit(self) -> int:
        """First come, first served: the head of the queue waits for a lane and for its host pages. How many joined.

        A sequence whose prefill fails stays at the head of the queue."""
        n_joined = 0
        while self._waiting and self._free_lanes:
            sequence = self._waiting[0]
            if not self.memory.pool.reserve(sequence.reserved_pages):
                break
            sequence.lane = self._free_lanes.pop(0)
            try:
                self._start(sequence)
            except BaseException as error:  # an interrupt too: a half-filled lane must never be decoded
                self.memory.pool.release(sequence.pages)
                self._free_lane(sequence)
                if isinstance(error, NumericsError):
                    raise NumericsError(f"sequence {sequence.id}: {error}; cancel it to go on") from None
                raise
            self._waiting.popleft()
            self._running.append(sequence)
            n_joined += 1
        return n_joined

    def _start(self, sequence: LiveSequence) -> None:
        """Fill the sequence's lane: by prefill, or from its saved KV."""
        memory, lane, n_tokens = self.memory, sequence.lane, sequence.n_prefill
        memory.ensure(lane + 1, n_tokens + 1)
        memory.clear_lane(lane, [])
        sequence.pages = memory.pool.allocate(memory.pages_for(n_tokens))
        memory.add_pages(lane, 0, sequence.pages)
        cost = None
        if sequence.restored is not None:
            memory.restore(lane, sequence.pages, sequence.restored)
            sequence.restored = None
        elif n_tokens:
            cost = self._prefill.run(sequence.tokens[:n_tokens], lane, sequence.pages)
            time_s = sum(cost.time_us) / 1e6
            self._metrics.prefill(n_tokens, sum(cost.h2d_bytes), sum(cost.d2h_bytes), time_s)
        sequence.n_cached = n_tokens
        if self._recorder is not None:
            known = sequence.tokens
            info = SequenceInfo(sequence.id, len(known), prompt_sha256(known))
            means = None
            if self._record_scores:
                n_windows = self.sparse.n_windows(n_tokens)
                means = [layer[lane, :, :n_windows] for layer in memory.context.beta_means]
            self._recorder.on_start_sequence(info, cost, means)

    def _make_room(self, batch: list[LiveSequence]) -> None:
        """Grow storage for this step's tokens, and give a host page to each block that they fill."""
        memory = self.memory
        memory.ensure(max(s.lane for s in batch) + 1, max(s.n_cached for s in batch) + 1)
        for sequence in batch:
            n_missing = memory.pages_for(sequence.n_cached + 1) - len(sequence.pages)
            if n_missing > 0:  # not so if this step failed once
                pages = memory.pool.allocate(n_missing)
                memory.add_pages(sequence.lane, len(sequence.pages), pages)
                sequence.pages += pages

    def _leave(self, sequence: LiveSequence) -> None:
        self._running.remove(sequence)
        self.memory.clear_lane(sequence.lane, sequence.pages)
        self._free_lane(sequence)
        if self._recorder is not None:
            self._recorder.on_leave(sequence.id)

    def _free_lane(self, sequence: LiveSequence) -> None:
        """Give back the lane and the pages' reservation; the pages themselves were released."""
        self.memory.pool.unreserve(sequence.reserved_pages)
        self._free_lanes = sorted([*self._free_lanes, sequence.lane])
        sequence.lane, sequence.pages = -1, []

    def _find(self, sequence_id: int) -> LiveSequence:
        for sequence in (*self._running, *self._waiting):
            if sequence.id == sequence_id:
                return sequence
        raise ConfigError(f"sequence {sequence_id} is neither waiting nor running (finished, cancelled or never added)")

    def _refuse_nan(self, logits: Tensor, rows: StepBatch) -> None:
        broken = ~logits.amax(dim=-1).isfinite()
        if broken.any():
            row = int(broken.nonzero()[0])
            raise NumericsError(
                f"NaN or infinite logits for sequence {rows.sequences[row]} at position {rows.positions[row]}; "
                "look for infinite or NaN weights and activations"
            )

    # ---- describing
    def _settings(self) -> dict[str, object]:
        return {
            "model": self.model.shape,
            "head": self.model.head,
            "sparse": self.sparse,
            "method": self.method.name,
        }

    def _trace_meta(self) -> TraceMeta:
        return TraceMeta(
            model=self.model.shape,
            sparse=self.sparse,
            method=self.method.name,
            head=self.model.head,
            schedule=self.schedule.name,
            slots=self.slots,
            policy=self.policy.name,
            kv_dtype=self.model.shape.dtype,
            host_kv_dtype=self.model.shape.dtype,
            device=self.model.device.type,
        )

    def summary(self) -> dict[str, object]:
        """Settings, memory in bytes, exact traffic in blocks and bytes, and rates (see metrics.py)."""
        figures = self._metrics.summary()
        notes = []
        if figures["n_rows"] and not figures["sparse_step_share"] and not self.method.dense:
            notes.append(
                f"no step was sparse: every context had at most k = {self.sparse.topk} blocks "
                f"({self.sparse.topk_tokens} tokens), so attention was dense"
            )
        longest, trained = self.memory.longest_tokens, self.model.config.max_positions
        if longest > trained:
            notes.append(f"contexts reached {longest} tokens; the model was made for {trained}: expect poor text")
        return {
            "method": self.method.name,
            "schedule": self.schedule.name,
            "policy": self.policy.name,
            "slots": self.memory.n_slots,
            "topk_blocks": self.sparse.topk,
            "topk_tokens": self.sparse.topk_tokens,
            "block_bytes": self.memory.block_bytes,
            "device_slot_bytes": self.memory.device_kv_bytes,
            "device_context_bytes": self.memory.context.allocated_bytes,
            "host_pool_bytes": self.memory.host_pool_bytes,
            **figures,
            "notes": notes,
        }


def _resolve_slots(slots: int | None, sparse: SparseConfig, dense: bool) -> int:
    if dense:
        if slots is not None:
            raise ConfigError(f"slots={slots}: method full keeps every block on the device; leave slots out")
        return 1
    if slots is None:
        return sparse.topk
    if slots < sparse.topk:
        raise CapacityError(
            f"slots={slots} cannot hold the {sparse.topk} blocks that one step attends to; "
            f"give at least topk={sparse.topk} slots, or lower topk"
        )
    return slots


def _count(plan: StepPlan) -> StepCount:
    rows, (n_layers, _, n_heads) = plan.batch, plan.n_misses.shape
    misses = plan.n_misses.sum(axis=(0, 2), dtype=np.int64)
    selected = np.minimum(rows.blocks, rows.dense_blocks) * (n_layers * n_heads)
    cold = np.array(rows.cold)
    return StepCount(
        n_rows=rows.size,
        n_cold_rows=int(cold.sum()),
        n_sparse_rows=sum(n > rows.dense_blocks for n in rows.blocks),
        n_selected=int(selected.sum()),
        n_misses=int(misses.sum()),
        cold_selected=int(selected[cold].sum()),
        cold_misses=int(misses[cold].sum()),
        n_filled_heads=rows.n_written_back * n_layers * n_heads,
    )
