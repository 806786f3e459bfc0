"""Engine: continuous batch decoding with NOSA attention and KV offload (arXiv 2510.13602, sections 3 and 4)."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

from nosa_sys.engine.describe import check_settings, count_step, settings, summary, trace_meta
from nosa_sys.engine.injection import Injection
from nosa_sys.engine.memory import Memory
from nosa_sys.engine.metrics import RunMetrics
from nosa_sys.engine.pinned import PinnedArena
from nosa_sys.engine.plan import StepBatch, StepPlan, make_batch
from nosa_sys.engine.prefill import PrefillRunner
from nosa_sys.engine.record_level import RECORD_NOTHING, RECORD_SCORES, RECORD_SELECTIONS
from nosa_sys.engine.recorder import Recorder
from nosa_sys.engine.runner import NOT_FINITE, StepResult
from nosa_sys.engine.sampling import SamplingParams, draw_rows
from nosa_sys.engine.sequence import Sequence as LiveSequence
from nosa_sys.engine.sequence import SequenceState, TokenEvent, make_request
from nosa_sys.engine.setup import (
    check_injection,
    check_sizes,
    make_runner,
    resolve_policy,
    resolve_runner,
    resolve_schedule,
    resolve_slots,
)
from nosa_sys.errors import CapacityError, ConfigError, NosaError, NumericsError
from nosa_sys.methods import get_method
from nosa_sys.models.llama import LlamaModel
from nosa_sys.sparse_config import SparseConfig

GREEDY = SamplingParams()


class Engine:
    """Decodes a batch of sequences of unequal lengths; sequences join and leave between steps.

    A step first admits and prefills waiting sequences (all of a prompt but its last token), then runs one decode step
    over all running ones. Storage grows with generation; with ``host_memory_bytes`` a sequence that can never fit is
    refused when it is added, and one that cannot fit yet waits.

    Args:
        schedule: the order of fetches and attention; on CUDA auto (the default) tries them and keeps the fastest.
        slots: device blocks per (layer, sequence, KV head), the current block included; default k, with graphs 1.25 k.
        policy: which blocks stay beyond the selection: exact (none), lru or beta; default exact where slots = k.
        host_kv_dtype: must be the model's dtype for now.
        key_means_dtype: how compressed keys are kept: float32 (the definition), or model: the model's dtype.
        prefill_chunk: prompt tokens per prefill pass; default 4096 on a GPU, which few of them leave idle, else 512.
        record_scores: keep stage-1 scores and beta means in the trace, for replay under other budgets.
        on_prefill: called with the number of prompt tokens of each finished prefill chunk, for progress bars.
        offload: finished blocks live in host memory; default for every method but full, which keeps all on the device.
        runner: graph (CUDA graphs; the default there), kernels (the same launches, not captured), or eager (reference
            operations one by one; the default on a CPU, and the unfused baseline on CUDA).
        arena: pinned host memory to take the block pool from; default: pinned as needed.
        injection: sets of blocks that take the place of the model's selections; needs max_batch sequences.
        inspect: keep each step's selections in ``last_plan`` and its ``last_logits``; no step then runs ahead.
        timed: clock marks at phase borders, so that plans carry phase times; each mark costs 1 to 2 us.
        skip_fetch, fetch_only: leave out copies, or everything but them: for measurements, tokens mean nothing.
        n_prefetch: guesses a head of schedule prefetch; default all spare slots.
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
        schedule: str | None = None,
        slots: int | None = None,
        policy: str | None = None,
        host_kv_dtype: str | None = None,
        key_means_dtype: str = "float32",
        prefill_chunk: int | None = None,
        max_batch: int = 8,
        host_memory_bytes: int | None = None,
        recorder: Recorder | None = None,
        record_scores: bool = False,
        poison: float | None = None,
        on_prefill: Callable[[int], None] | None = None,
        offload: bool | None = None,
        runner: str | None = None,
        arena: PinnedArena | None = None,
        injection: Injection | None = None,
        inspect: bool = False,
        timed: bool = False,
        skip_fetch: bool = False,
        fetch_only: bool = False,
        n_prefetch: int | None = None,
    ) -> None:
        self.model, self.sparse = model, sparse
        self.method = get_method(method)
        self.method.check(sparse)
        self.offload = not self.method.dense if offload is None else offload
        self.runner_name = resolve_runner(runner, model.device.type)
        self.slots = resolve_slots(slots, sparse, offload=self.offload, runner=self.runner_name)
        self.policy = resolve_policy(policy, self.slots, sparse.topk)
        check_sizes(prefill_chunk=prefill_chunk, max_batch=max_batch, host_memory_bytes=host_memory_bytes)
        if host_kv_dtype not in (None, model.shape.dtype):
            raise ConfigError(f"host_kv_dtype={host_kv_dtype!r} must equal the model's dtype {model.shape.dtype!r}")
        if injection is not None:
            check_injection(injection, model, sparse, self.method, max_batch=max_batch, record_scores=record_scores)
        self.max_batch, self.injection = max_batch, injection
        self.memory = Memory(
            model,
            sparse,
            self.method,
            n_slots=self.slots,
            offload=self.offload,
            host_memory_bytes=host_memory_bytes,
            arena=arena,
            key_means_dtype=key_means_dtype,
            keep_context=not self.method.dense or record_scores,
            poison=poison,
        )
        self._prefill = PrefillRunner(model, self.memory, prefill_chunk, on_prefill)
        record = RECORD_SCORES if record_scores else RECORD_SELECTIONS if recorder or inspect else RECORD_NOTHING
        self.schedule = resolve_schedule(schedule, self.runner_name)
        self._runner = make_runner(
            self.runner_name,
            model,
            self.memory,
            self.policy,
            self.schedule,
            record=record,
            max_lanes=max_batch,
            injection=injection,
            inspect=inspect,
            timed=timed,
            skip_fetch=skip_fetch,
            fetch_only=fetch_only,
            n_prefetch=n_prefetch,
        )
        self._whole_life = self.runner_name == "graph"
        self._record_scores = record_scores
        self._waiting: deque[LiveSequence] = deque()
        self._running: list[LiveSequence] = []
        self._in_flight: deque[tuple[StepBatch, list[LiveSequence]]] = deque()
        self._ready: list[TokenEvent] = []
        self._free_lanes = list(range(max_batch))
        self._next_id = self._next_step = self.longest_tokens = 0
        self._torn = self.has_synthetic = False
        self._step_end_s: float | None = None
        self._metrics = RunMetrics(self.memory.block_bytes)
        self.outputs: dict[int, list[int]] = {}
        self.last_plan: StepPlan | None = None
        self.last_logits: Tensor | None = None
        self._recorder = recorder
        if recorder is not None:
            recorder.start(trace_meta(self), self.method.dense)

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
        request, tokens = make_request(
            prompt, max_new_tokens, sampling, eos_ids, force_tokens, vocab_size=self.model.shape.vocab_size
        )
        return self._enqueue(LiveSequence(self._next_id, request, tokens, sampling.generator()))

    def fill_synthetic(self, contexts: Sequence[int], *, seed: int = 0, max_new_tokens: int = 1) -> list[int]:
        """Queue sequences of so many random tokens each, whose KV is random too: nothing is prefilled, so that shapes
        whose prefill would take hours can be timed; ``summary`` says so. Returns their ids."""
        self.has_synthetic = True
        ids, vocab = [], self.model.shape.vocab_size
        for first, context in enumerate(contexts, seed):
            ids.append(self.add([t % vocab for t in range(first, first + context)], max_new_tokens))
            self._waiting[-1].synthetic_seed = first
        return ids

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
        self._drain()
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._running:
            self._leave(sequence)

    def save(self, sequence_id: int) -> SequenceState:
        """Copy a waiting or running sequence with its KV; it goes on itself. ConfigError if it is neither."""
        sequence = self._find(sequence_id)
        self._drain()
        kv = sequence.restored
        if sequence.lane >= 0:
            kv = self.memory.save(sequence.lane, sequence.pages, sequence.n_prefill)
        return SequenceState(
            request=sequence.request,
            tokens=tuple(sequence.tokens),
            n_generated=sequence.n_generated,
            settings=settings(self),
            kv=kv,
        )

    def resume(self, state: SequenceState) -> int:
        """Queue a saved sequence under a new id; it goes on as if never interrupted, its first step being cold.

        ConfigError when the model or the selection settings differ (slots and policy may).
        """
        check_settings(self, state.settings)
        request = state.request
        generator, tokens = request.sampling.generator(), list(state.tokens)
        return self._enqueue(
            LiveSequence(self._next_id, request, tokens, generator, state.n_generated, restored=state.kv)
        )

    def stop_recording(self) -> None:
        """Go on without the recorder, which is the caller's to close; memory for what it recorded is given back."""
        self._drain()
        self._recorder, self._record_scores = None, False
        self._runner.stop_recording()

    # ---- running
    @property
    def idle(self) -> bool:
        return not (self._waiting or self._running or self._ready)

    @property
    def schedule_in_use(self) -> str:
        """The schedule of the running steps; under auto the fastest one found so far."""
        return self._runner.schedule_in_use

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

        Where the runner looks ahead, the next step is on its way already when this one's tokens are returned. After a
        NumericsError the named sequence can be cancelled and the others go on. Anything else that stops a step
        half-way (an interrupt, a full disk) may leave blocks marked resident that never arrived: later calls raise
        NosaError.
        """
        if self._torn:
            raise NosaError("an earlier step was stopped half-way; save the sequences and resume them in a new engine")
        if not self._in_flight:
            n_joined = self._admit()
            if not self._running:
                return self._take_ready()
            if n_joined or self._step_end_s is None:
                self._step_end_s = time.perf_counter()
        with self._undivided():
            if not self._in_flight:
                self._launch()
            if self._next_is_certain():
                # what cannot be launched yet says so when its turn comes, behind this step's tokens
                with contextlib.suppress(CapacityError, ConfigError):
                    self._launch()
            events = self._finish()
        return [*self._take_ready(), *events]

    @contextlib.contextmanager
    def _undivided(self) -> Iterator[None]:
        """Work that leaves the engine torn where anything but a NumericsError ends it."""
        self._torn = True
        try:
            yield
        except NumericsError:
            self._torn = False
            raise
        self._torn = False

    def _take_ready(self) -> list[TokenEvent]:
        """Events of steps that ended outside ``step``."""
        events, self._ready = self._ready, []
        return events

    def _launch(self) -> None:
        """Start a step of all running sequences, behind those in flight."""
        batch = list(self._running)
        self._make_room(batch)
        self.longest_tokens = max(self.longest_tokens, *(s.n_cached + 1 for s in batch))
        rows = make_batch(
            self._next_step,
            [s.id for s in batch],
            [s.lane for s in batch],
            [s.n_cached for s in batch],
            [s.cold for s in batch],
            self.sparse,
            self.method,
            offload=self.offload,
        )
        draws = draw_rows([s.request.sampling for s in batch], [s.draw for s in batch])
        self._runner.launch(rows, [s.token_at(s.n_cached) for s in batch], draws)
        self._next_step += 1
        for sequence in batch:
            sequence.n_cached += 1
            sequence.cold = False
        self._in_flight.append((rows, batch))

    def _next_is_certain(self) -> bool:
        """Whether the step after the one in flight can be told already: nobody joins and nobody leaves before it, nor
        with it, so that a sequence never ends in a step that the caller has not asked for."""
        if not self._runner.looks_ahead or (self._waiting and self._free_lanes):
            return False
        return not any(s.may_end_soon for s in self._running)

    def _drain(self) -> None:
        """Finish the steps in flight; their events come with the next ``step``. Of an engine that was stopped half-way
        they are dropped: its sequences are where their last tokens left them."""
        if self._torn:
            self._in_flight.clear()
        while self._in_flight:
            with self._undivided():
                self._ready += self._finish()

    def _finish(self) -> list[TokenEvent]:
        """Collect the oldest step in flight and account for it."""
        rows, batch = self._in_flight[0]
        result = self._runner.collect()
        self._in_flight.popleft()
        if result.failures:
            raise self._failed(rows, batch, result)
        return self._account(batch, result.tokens, result.plan, result.logits)

    def _account(
        self, batch: list[LiveSequence], tokens: list[int], plan: StepPlan, logits: Tensor | None
    ) -> list[TokenEvent]:
        now = time.perf_counter()
        self.last_plan, self.last_logits = plan, logits
        # from the end of the step before: what recording and the caller did in between is part of the rate
        self._metrics.step(count_step(plan), now - (self._step_end_s or now))
        self._step_end_s = now
        if self._recorder is not None:
            self._recorder.on_step(plan, self._runner.last_spans)
        events = []
        for sequence, token in zip(batch, tokens, strict=True):
            event = sequence.accept(token)
            self.outputs[sequence.id].append(event.token)
            self._metrics.token(sequence.id, now)
            events.append(event)
            if event.finished:
                self._leave(sequence)
        if not self._running:
            self._step_end_s = None
        return events

    def _failed(self, rows: StepBatch, batch: list[LiveSequence], result: StepResult) -> NumericsError:
        """Account for the rows that are sound, their events coming with the next ``step``, and put the others back to
        before the step at which they failed."""
        steps = [(rows, batch, result)]
        steps += [(*step, self._runner.collect()) for step in self._in_flight]
        self._in_flight.clear()
        bad: set[int] = set()
        for plan_rows, sequences, found in steps:
            for row in found.failures:
                if sequences[row].id not in bad:
                    sequences[row].n_cached, sequences[row].cold = plan_rows.positions[row], plan_rows.cold[row]
            bad |= {sequences[row].id for row in found.failures}
            sound = [row for row, s in enumerate(sequences) if s.id not in bad]
            if sound:
                tokens = [found.tokens[row] for row in sound]
                self._ready += self._account([sequences[row] for row in sound], tokens, found.plan.subset(sound), None)
        row, reason = min(result.failures.items())
        if reason == NOT_FINITE:
            reason += "; look for infinite or NaN weights and activations"
        return NumericsError(
            f"sequence {rows.sequences[row]} at position {rows.positions[row]}, step {rows.step}: {reason}; "
            "cancel it to go on"
        )

    def _admit(self) -> int:
        """First come, first served: the head of the queue waits for a lane and for its host pages. How many joined.

        A sequence whose prefill fails stays at the head of the queue."""
        if self._whole_life and self._waiting and self._free_lanes:
            self._make_room_for_life()
        n_joined = 0
        while self._waiting and self._free_lanes:
            sequence = self._waiting[0]
            if not self.memory.pool.reserve(sequence.reserved_pages):
                break
            sequence.lane = self._free_lanes.pop(0)
            try:
                self._start(sequence)
            except BaseException as error:  # an interrupt too: a half-filled lane must never be decoded
                self.memory.settle()  # no copy of it may arrive in a page that is another's by then
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
        sequence.pages = memory.pool.allocate(
            sequence.reserved_pages if self._whole_life else memory.pages_for(n_tokens)
        )
        memory.add_pages(lane, 0, sequence.pages)
        cost = None
        if sequence.restored is not None:
            memory.restore(lane, sequence.pages, sequence.restored)
            sequence.restored = None
        elif sequence.synthetic_seed is not None:
            memory.fill_synthetic(lane, sequence.pages, n_tokens, sequence.synthetic_seed)
        elif n_tokens:
            cost = self._prefill.run(sequence.tokens[:n_tokens], lane, sequence.pages)
            time_s = sum(cost.time_us) / 1e6
            self._metrics.prefill(n_tokens, sum(cost.h2d_bytes), sum(cost.d2h_bytes), time_s)
        sequence.n_cached = n_tokens
        if self._recorder is not None:
            means = None
            if self._record_scores:
                n_windows = self.sparse.n_windows(n_tokens)
                means = [layer[lane, :, :n_windows] for layer in memory.context.beta_means]
            self._recorder.on_start_sequence(sequence.info, cost, means)

    def _make_room_for_life(self) -> None:
        """Storage of all that can join now, to the end of their lives: a graph's memory should not move under it."""
        joining = list(self._waiting)[: len(self._free_lanes)]
        n_pages = self.memory.pool.pages_in_use + sum(s.reserved_pages for s in joining)
        self.memory.make_room(self.max_batch, max(s.max_stored_tokens for s in joining), n_pages)

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

    def summary(self) -> dict[str, object]:
        """Settings, memory in bytes, exact traffic in blocks and bytes, and rates (see metrics.py)."""
        return summary(self, self._metrics.summary())
