"""From model, budget, cache and decode options to a CaptureRequest: shared by ``capture`` and ``generate``."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nosa_sys.cli.budgets import resolve_budgets
from nosa_sys.cli.memory_rows import MemoryNeed, note_memory
from nosa_sys.cli.options import BudgetFlags, CacheFlags, DecodeFlags, EngineFlags, ModelFlags
from nosa_sys.cli.settings import Settings
from nosa_sys.errors import ConfigError
from nosa_sys.methods import get_method
from nosa_sys.model_shape import DTYPE_BYTES, PRESETS, ModelShape
from nosa_sys.slot_count import default_slots, slots_of
from nosa_sys.sparse_config import SparseConfig

if TYPE_CHECKING:
    from nosa_sys.experiments.capture import CaptureRequest

DEFAULT_MODEL = "smollm2-135m"
_MAX_PROMPT_BYTES = 256 * 2**20
_MAX_COUNT = 2**31 - 1  # torch takes sizes and thread counts as C integers
# SmolLM2's tokenizer makes about this many characters of English a token; for the banner's estimate alone
_CHARACTERS_PER_TOKEN = 3.6


def read_prompt(path: Path) -> str:
    """The text of a prompt file; ConfigError names a missing, empty, oversized or undecodable one."""
    if not path.is_file():
        raise ConfigError(f"no such prompt file: {path}")
    n_bytes = path.stat().st_size
    if n_bytes > _MAX_PROMPT_BYTES:
        raise ConfigError(f"{path} has {n_bytes} bytes, more than the limit of {_MAX_PROMPT_BYTES} for a prompt")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    if not text:
        raise ConfigError(f"{path} is empty; a prompt needs at least one character")
    return text


def build_request(
    settings: Settings,
    prompts: tuple[str, ...],
    model: ModelFlags,
    budgets: BudgetFlags,
    cache: CacheFlags,
    engine: EngineFlags,
    decode: DecodeFlags,
    *,
    seed: int | None,
    record_scores: bool = False,
    force_tokens: Any = None,
    timed: bool = False,
) -> tuple[CaptureRequest, MemoryNeed | None]:
    """Resolve and note every setting; raises before any weight is read. The bytes needed are None for a model whose
    shape is not known yet."""
    from nosa_sys.engine.sampling import SamplingParams  # torch: only the verbs that decode wait for it
    from nosa_sys.engine.setup import resolve_guesses, resolve_policy, resolve_runner
    from nosa_sys.experiments.capture import CaptureRequest

    name = settings.pick("model", model.model, DEFAULT_MODEL)
    sparse = resolve_budgets(budgets, settings, SparseConfig(), "default")
    method = settings.pick("method", cache.method, "nosa")
    get_method(method).check(sparse)
    device = settings.pick("device", model.device, "cpu")
    chosen = _engine_choices(settings, engine, device, timed=timed)
    given, slots_origin = settings.find("slots", cache.slots, None)
    slots = None if given is None else slots_of(given, sparse.topk)
    dense = get_method(method).dense
    offload, offload_origin = settings.find("offload", engine.offload, bool)
    offloads = not dense if offload is None else bool(offload)
    settings.note("offload", offloads, offload_origin or "derived from method")
    by_default = default_slots(sparse.topk, resolve_runner(chosen["runner"], device.partition(":")[0]))
    n_slots = by_default if slots is None else slots
    if offloads:
        settings.note("slots", n_slots, slots_origin or f"derived: {by_default / sparse.topk:g} k")
    if n_slots > _MAX_COUNT:
        raise ConfigError(f"slots={n_slots} exceeds the limit of {_MAX_COUNT}")
    policy, policy_origin = settings.find("policy", cache.policy, str)
    if offloads:
        shown = policy if policy is not None else ("exact" if n_slots <= sparse.topk else "lru")
        settings.note("policy", shown, policy_origin or "derived")
    if policy == "belady":
        raise ConfigError("policy belady knows the future, so it exists in nosa replay alone; use exact, lru or beta")
    head = settings.pick("head", model.head, "ed_dma")
    dtype = settings.pick("dtype", model.dtype, "float32")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype={dtype!r} must be one of {', '.join(DTYPE_BYTES)}")
    sampling = SamplingParams(
        temperature=settings.pick("temperature", decode.temperature, 0.0),
        top_p=settings.pick("top_p", decode.top_p, 1.0),
        seed=settings.pick("seed", seed, 0),
    )
    new_tokens = settings.pick("max_new_tokens", decode.max_new_tokens, 64)
    if new_tokens < 1:
        raise ConfigError(f"max_new_tokens={new_tokens} must be >= 1")
    cut, cut_origin = settings.find("max_prompt_tokens", decode.max_prompt_tokens, int)
    settings.note("max_prompt_tokens", "no cut" if cut is None else cut, cut_origin or "default")
    if cut is not None and cut < 1:
        raise ConfigError(f"max_prompt_tokens={cut} must be >= 1")
    threads, threads_origin = settings.find("threads", model.threads, int)
    if threads is not None and not 1 <= threads <= _MAX_COUNT:
        raise ConfigError(f"threads={threads} must lie in [1, {_MAX_COUNT}]")
    settings.note("threads", "as torch chooses" if threads is None else threads, threads_origin or "default")
    adapter, adapter_origin = settings.find("adapter", None if model.adapter is None else str(model.adapter), str)
    settings.note("adapter", adapter or "as shipped or in the checkpoint", adapter_origin or "default")
    rope_theta, rope_origin = settings.find("rope_theta", model.rope_theta, float)
    if rope_theta is not None and not 0 < rope_theta < math.inf:
        raise ConfigError(f"rope_theta={rope_theta} must be a finite number > 0; leave it out for the model's own")
    base = "as the adapter's record or the model has" if rope_theta is None else rope_theta
    settings.note("rope_theta", base, rope_origin or "default")
    need = None
    resolve_guesses(
        chosen["n_prefetch"],
        chosen["schedule"],
        chosen["runner"],
        resolve_policy(policy, n_slots, sparse.topk),
        n_spare=n_slots - sparse.topk,
        offload=offloads,
    )
    if name in PRESETS or Path(name).is_dir():
        tokens = max(len(text) for text in prompts) / _CHARACTERS_PER_TOKEN
        tokens = int(min(tokens, cut) if cut is not None else tokens) + new_tokens
        settings.note("context, estimated", f"about {tokens:,} tokens", "derived")
        shape = dataclasses.replace(ModelShape.resolve(name), dtype=dtype)
        need = note_memory(
            settings,
            shape,
            sparse,
            method,
            n_slots=n_slots,
            offload=offloads,
            batch=len(prompts),
            tokens=tokens,
            device=device,
            key_means_dtype=chosen["key_means_dtype"],
            keep_context=True if record_scores else None,
        )
    request = CaptureRequest(
        sparse=sparse,
        prompts=prompts,
        max_new_tokens=new_tokens,
        model=name,
        method=method,
        slots=n_slots if offloads else slots,
        policy=policy,
        head=head,
        dtype=dtype,
        device=device,
        adapter=adapter,
        convert_dense=settings.pick("convert_dense", model.convert_dense, False),
        rope_theta=rope_theta,
        record_scores=record_scores,
        force_tokens=force_tokens,
        sampling=sampling,
        ignore_eos=settings.pick("ignore_eos", decode.ignore_eos, False),
        max_prompt_tokens=cut,
        threads=threads,
        offload=offload,
        timed=timed,
        **chosen,
    )
    return request, need


def _engine_choices(settings: Settings, engine: EngineFlags, device: str, *, timed: bool) -> dict[str, Any]:
    """Runner, schedule, guesses and prefill chunk, noted; ConfigError for what the engine does not have."""
    from nosa_sys.engine.setup import default_prefill_chunk, resolve_runner, resolve_schedule

    kind = device.split(":")[0]
    runner, origin = settings.find("runner", engine.runner, str)
    runner = settings.note("runner", resolve_runner(runner, kind), origin or "derived from device")
    schedule, origin = settings.find("schedule", engine.schedule, str)
    schedule = settings.note("schedule", resolve_schedule(schedule, runner), origin or "derived from runner")
    n_prefetch, origin = settings.find("n_prefetch", engine.n_prefetch, int)
    if origin:
        settings.note("n_prefetch", n_prefetch, origin)
    chunk = settings.note("prefill chunk, tokens", default_prefill_chunk(kind), "derived from device")
    if timed and runner == "eager":
        raise ConfigError("--timeline needs --runner graph or kernels: the eager runner sets no clock marks")
    means = settings.pick("key_means_dtype", engine.key_means_dtype, "float32")
    found = {"runner": runner, "schedule": schedule, "n_prefetch": n_prefetch, "prefill_chunk": chunk}
    return found | {"key_means_dtype": means}
