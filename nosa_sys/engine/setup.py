"""From an engine's arguments to its parts: slot count, runner, fetch path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nosa_sys.engine.decode import DecodeRunner
from nosa_sys.engine.injection import Injection
from nosa_sys.engine.memory import Memory
from nosa_sys.engine.policies import Policy, get_policy
from nosa_sys.engine.record_level import RECORD_SCORES
from nosa_sys.engine.runner import EagerRunner, StepRunner
from nosa_sys.engine.schedules import get_schedule
from nosa_sys.errors import CapacityError, ConfigError
from nosa_sys.methods import Method
from nosa_sys.models.llama import LlamaModel
from nosa_sys.slot_count import default_slots
from nosa_sys.sparse_config import SparseConfig

if TYPE_CHECKING:
    from nosa_sys.engine.cuda.schedules import StepSchedule

RUNNERS = ("graph", "kernels", "eager")
AUTO = "auto"
_MOST_LANES = 2**16
CANDIDATES = ("fused_kv", "split_merge", "two_batch")


def resolve_slots(slots: int | None, sparse: SparseConfig, *, offload: bool, runner: str) -> int:
    """Device slots of a head; a method whose KV stays on the device has none to choose (1 is then a place-holder)."""
    if not offload:
        if slots is not None:
            raise ConfigError(f"slots={slots}: without offloading every block stays on the device; leave slots out")
        return 1
    if slots is None:
        return default_slots(sparse.topk, runner)
    if slots < sparse.topk:
        raise CapacityError(
            f"slots={slots} cannot hold the {sparse.topk} blocks that one step attends to; "
            f"give at least topk={sparse.topk} slots, or lower topk"
        )
    return slots


def resolve_policy(policy: str | None, slots: int, topk: int) -> Policy:
    """The policy asked for; by default exact where there are no slots beyond k, else lru."""
    return get_policy(policy or ("exact" if slots <= topk else "lru"))


def check_sizes(*, prefill_chunk: int | None, max_batch: int, host_memory_bytes: int | None) -> None:
    """ConfigError for a size below 1."""
    for name, value in (("prefill_chunk", prefill_chunk), ("max_batch", max_batch)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} must be >= 1")
    if max_batch > _MOST_LANES:
        raise ConfigError(f"max_batch={max_batch} exceeds the limit of {_MOST_LANES} sequences at once; lower it")
    if host_memory_bytes is not None and host_memory_bytes < 1:
        raise ConfigError(f"host_memory_bytes={host_memory_bytes} must be >= 1; leave it out for no limit")


def check_injection(
    injection: Injection,
    model: LlamaModel,
    sparse: SparseConfig,
    method: Method,
    *,
    max_batch: int,
    record_scores: bool,
) -> None:
    """ConfigError where injected selections do not go with the model, the budget, the method, the batch, or recorded
    scores."""
    if method.dense:
        raise ConfigError(f"method {method.name} attends to everything; leave the injection out")
    if record_scores or max_batch != len(injection.contexts):
        raise ConfigError(
            f"injected selections are for a batch of {len(injection.contexts)} without scores; "
            f"max_batch={max_batch}, record_scores={record_scores} do not go with them"
        )
    found = tuple(injection.ids_table.shape[1:])
    needed = (model.n_layers, max_batch, model.shape.n_kv_heads, sparse.topk)
    if found != needed:
        raise ConfigError(
            f"injected sets of {found} (layers, batch, KV heads, k) do not fit this engine's {needed}; make them anew"
        )


def default_prefill_chunk(device_type: str) -> int:
    """Prompt tokens per prefill pass where nobody says: a GPU needs more of them to be busy."""
    return 4096 if device_type == "cuda" else 512


def resolve_runner(runner: str | None, device_type: str) -> str:
    """The runner asked for, or that of the device. ConfigError for an unknown one, and for graphs without CUDA."""
    name = runner or ("graph" if device_type == "cuda" else "eager")
    if name not in RUNNERS:
        raise ConfigError(f"unknown runner {name!r}; known: {', '.join(RUNNERS)}")
    if name == "graph" and device_type != "cuda":
        raise ConfigError("runner='graph' needs a CUDA device; use 'eager' or 'kernels'")
    return name


def resolve_schedule(schedule: str | None, runner: str) -> str:
    """The schedule asked for; by default the fastest one found while running, serial where nothing overlaps.

    ConfigError for one that the runner does not have."""
    name = schedule or ("serial" if runner == "eager" else AUTO)
    if runner == "eager":
        get_schedule(name)
    elif name != AUTO:
        _step_schedule(name)
    return name


def _step_schedule(name: str) -> StepSchedule:
    from nosa_sys.engine.cuda.schedules import get_step_schedule

    return get_step_schedule(name)


def resolve_guesses(
    n_prefetch: int | None, schedule: str, runner: str, policy: Policy, *, n_spare: int, offload: bool
) -> int:
    """Guesses a head of a schedule that speculates (by default all ``n_spare`` slots beyond k), 0 for any other.

    ConfigError where there is no room to guess, or nobody who does."""
    if runner == "eager" or schedule == AUTO or not _step_schedule(schedule).speculates:
        if n_prefetch:
            raise ConfigError(f"n_prefetch={n_prefetch}: schedule {schedule} does not speculate; use schedule prefetch")
        return 0
    guesses = n_spare if n_prefetch is None else n_prefetch
    if not (offload and policy.ranks_by_use and 1 <= guesses <= n_spare):
        raise ConfigError(
            f"schedule {schedule} needs offloading, policy lru and 1 <= n_prefetch={guesses} <= spare slots "
            f"(slots - topk = {n_spare}); raise slots"
        )
    return guesses


def _check_guesses(injection: Injection, width: int) -> None:
    """ConfigError unless the injection has guesses for schedule prefetch, ``width`` blocks a head with the set."""
    table = injection.guess_table
    if table is None or table.shape[-1] != width:
        found = "none" if table is None else f"sets of {table.shape[-1]} blocks"
        raise ConfigError(
            f"schedule prefetch needs injected guesses, sets of topk + n_prefetch = {width} blocks; the injection has "
            f"{found}: make them with injected_guesses, or take another schedule"
        )


def make_runner(
    name: str,
    model: LlamaModel,
    memory: Memory,
    policy: Policy,
    schedule: str,
    *,
    record: int,
    max_lanes: int,
    injection: Injection | None,
    inspect: bool,
    timed: bool,
    skip_fetch: bool,
    fetch_only: bool,
    n_prefetch: int | None,
) -> StepRunner:
    """The runner that ``name`` (see `resolve_runner`) asks for. ConfigError for what it cannot do."""
    n_spare = memory.n_slots - memory.cfg.topk
    guesses = resolve_guesses(n_prefetch, schedule, name, policy, n_spare=n_spare, offload=memory.offload)
    if guesses and injection is not None:
        _check_guesses(injection, memory.cfg.topk + guesses)
    if name == "eager":
        asked = {"timed": timed, "skip_fetch": skip_fetch, "fetch_only": fetch_only}
        if refused := [option for option, given in asked.items() if given]:
            raise ConfigError(f"the eager runner has no {refused[0]}; use runner='graph' or 'kernels'")
        scores = record == RECORD_SCORES
        return EagerRunner(
            DecodeRunner(model, memory, policy, get_schedule(schedule), record_scores=scores, injection=injection)
        )
    if record == RECORD_SCORES and memory.method.dense:
        raise ConfigError(
            f"record_scores: method {memory.method.name} selects nothing, so runner {name!r} scores nothing; use "
            "runner='eager', or record without scores"
        )
    from nosa_sys.engine.cuda.fetch_choice import fetch_paths
    from nosa_sys.engine.cuda.runner import GraphRunner
    from nosa_sys.engine.cuda.spec import StepOptions

    names: tuple[str, ...] = (schedule,)
    if schedule == AUTO:
        names = CANDIDATES if memory.offload else CANDIDATES[:1]
    schedules = [_step_schedule(name) for name in names]
    if fetch_only and injection is None:
        raise ConfigError("fetch_only needs injected selections: without attention nothing tells what to select")
    alone, beside = fetch_paths(model.device)
    options = StepOptions(
        alone=alone,
        beside=beside,
        record=record,
        skip_fetch=skip_fetch,
        fetch_only=fetch_only,
        timed=timed,
        n_prefetch=guesses,
    )
    return GraphRunner(
        model,
        memory,
        policy,
        schedules,
        options,
        max_lanes=max_lanes,
        capture=name == "graph",
        injection=injection,
        inspect=inspect,
    )
