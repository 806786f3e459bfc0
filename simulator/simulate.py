"""simulate: the predicted step time and throughput of a trace or a synthetic workload on some hardware."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from nosa_sys.errors import ConfigError
from nosa_sys.model_shape import ModelShape
from nosa_sys.simulator.cost_model import CostModel
from nosa_sys.simulator.engine_cost import EngineCostModel, untimed_matrices
from nosa_sys.simulator.grid import check_grid
from nosa_sys.simulator.hardware import HardwareProfile, load_hardware
from nosa_sys.simulator.host_storage import host_storage
from nosa_sys.simulator.link import LINK_NUMBERS, OWN_LINK, LinkDescription
from nosa_sys.simulator.locality.registry import get_locality
from nosa_sys.simulator.locality_model import ScoreModel
from nosa_sys.simulator.pipeline import Span
from nosa_sys.simulator.prediction import Prediction, predict
from nosa_sys.simulator.schedules import Schedule, get_schedule
from nosa_sys.simulator.sources import (
    Request,
    Source,
    SyntheticSource,
    SyntheticWorkload,
    TableSource,
    TraceSource,
    resolve_slots,
)
from nosa_sys.simulator.step_times import StepCosts, StepTimes
from nosa_sys.simulator.workload import Workload
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.miss_table import MissTable
from nosa_sys.traces.perfetto import side_by_side, write_timeline_file
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.timeline import StepMarks, measured_events, timeline_events, write_timeline

ENGINES = ("recurrence", "simpy")


def simulate(
    source: str | Path | Trace | MissTable | SyntheticWorkload,
    *,
    hardware: str | Path | HardwareProfile,
    model_shape: str | ModelShape | None = None,
    context: int | None = None,
    batch: int | None = None,
    steps: int | None = None,
    schedule: str = "serial",
    sparse: SparseConfig | None = None,
    method: str | None = None,
    slots: int | None = None,
    policy: str | None = None,
    h2d_gbps: float | None = None,
    seed: int = 0,
    engine: str = "recurrence",
    timeline: str | Path | None = None,
    prefetch_blocks: int | None = None,
    prefetch_hit_share: float | None = None,
    link: str | Path | LinkDescription | None = None,
    host_kv_dtype: str | None = None,
    dequant_gbps: float | None = None,
    dequant_fixed_us: float | None = None,
    extrapolate: bool = False,
    with_measured: bool = False,
    locality: str | ScoreModel | None = None,
) -> Prediction:
    """Predict decode on ``hardware``: a profile name, the directory of a bundle, or a profile.

    ``source`` is a trace (or its directory), a table of misses (give ``model_shape`` and ``sparse`` with it), or a
    SyntheticWorkload. On a trace's own model, batch, context and steps its recorded misses are used as they are; any
    other value of these, or of the budgets, follows the rules that the prediction lists. ``h2d_gbps`` replaces the
    profile's host-to-device bandwidth. ``schedule``: serial, fused_kv, split_merge, two_batch or prefetch, the last
    with ``prefetch_blocks`` a head (default: every slot beyond k) and the assumed ``prefetch_hit_share`` (default 0.5)
    of them that the next step would miss. ``engine``: "recurrence" (numpy) or "simpy" give the same numbers;
    ``timeline`` writes the SimPy run as a Chrome trace (gzip), ``with_measured`` with the run of the trace itself
    beside it under the same tracks. ``link`` (a name, a file or a description) puts the
    device on another link, ``h2d_gbps`` then replaces that one's bandwidth. ``host_kv_dtype`` keeps host blocks in
    another `KvFormat` (as int4), with the assumed ``dequant_gbps`` and ``dequant_fixed_us``. A situation outside what
    the profile was measured at is refused, or with ``extrapolate`` priced and labelled.
    ``locality`` (simple, fitted:NAME or a model) draws all misses from that model, in the situation of the trace or
    workload.

    Raises NosaError subclasses naming the value at fault.

    >>> from nosa_sys import ModelShape, SparseConfig, simulate
    >>> work = SyntheticWorkload(ModelShape.preset("nosa-8b"), SparseConfig(), context=16384, batch=2, steps=4)
    >>> slow, fast = (simulate(work, hardware="ideal", h2d_gbps=x) for x in (25.0, 50.0))
    >>> round(slow.step_time_us / fast.step_time_us, 9)
    2.0
    """
    if engine not in ENGINES:
        raise ConfigError(f"engine={engine!r} must be one of {', '.join(ENGINES)}")
    if with_measured and (timeline is None or isinstance(source, MissTable | SyntheticWorkload)):
        raise ConfigError("with_measured needs timeline= (--timeline) and a trace, whose own run is shown beside it")
    plan = get_schedule(schedule, prefetch_blocks=prefetch_blocks, prefetch_hit_share=prefetch_hit_share)
    profile = load_hardware(hardware).with_link(link).with_h2d_gbps(h2d_gbps)
    _ = profile.link_gbps  # refuse a missing bandwidth before any work
    shape = ModelShape.resolve(model_shape) if isinstance(model_shape, str) else model_shape
    storage = host_storage(host_kv_dtype, dequant_gbps, dequant_fixed_us)
    request = Request(shape, context, batch, steps, sparse, method, slots, policy, seed, storage)
    model = get_locality(locality) if isinstance(locality, str) else locality
    workload = _open(source, request, model).workload(request)
    if extrapolate:
        profile = profile.extrapolating()
    else:
        check_grid(workload, profile)
    if engine == "recurrence" and timeline is None:
        return price([(workload, profile)], plan)[0]
    costs = _costs(workload, profile, plan)
    times, spans = plan.simpy(costs)
    if timeline is not None:
        marks = _marks(workload, times, spans)
        if with_measured and not isinstance(source, MissTable | SyntheticWorkload):
            _write_both(timeline, list(marks), source if isinstance(source, Trace) else Trace.open(source))
        else:
            write_timeline(timeline, marks)
    if engine == "recurrence":  # the same numbers to the last bit, with and without a timeline
        times = plan.recurrence(costs)
    return predict(workload, profile, plan, costs, times, _rules(workload, plan, profile))


def price(situations: list[tuple[Workload, HardwareProfile]], schedule: Schedule) -> list[Prediction]:
    """Predictions of many situations of one model through one call of the fast path, in the same order."""
    costs = [_costs(workload, profile, schedule) for workload, profile in situations]
    times = schedule.recurrence(costs[0] if len(costs) == 1 else StepCosts.concatenate(costs))
    found, begin = [], 0
    for (workload, profile), own in zip(situations, costs, strict=True):
        rows = slice(begin, begin + len(own))
        found.append(predict(workload, profile, schedule, own, times.rows(rows), _rules(workload, schedule, profile)))
        begin += len(own)
    return found


def open_source(source: str | Path | Trace | SyntheticWorkload, locality: ScoreModel | None = None) -> Source:
    """A source that answers any number of requests; ``locality`` replaces what its misses come from."""
    if isinstance(source, SyntheticWorkload):
        return SyntheticSource(source if locality is None else dataclasses.replace(source, locality=locality))
    return TraceSource(source if isinstance(source, Trace) else Trace.open(source), locality)


def _open(
    source: str | Path | Trace | MissTable | SyntheticWorkload, request: Request, locality: ScoreModel | None
) -> Source:
    if not isinstance(source, MissTable):
        return open_source(source, locality)
    if locality is not None:
        raise ConfigError("a table of misses has misses of its own: pass a trace or a SyntheticWorkload with locality=")
    if request.model_shape is None:
        raise ConfigError("a table of misses needs model_shape= (the model that it was counted on)")
    sparse = request.sparse or SparseConfig().with_block_size(source.block_size)
    if sparse.block_size != source.block_size:
        raise ConfigError(f"sparse.block_size={sparse.block_size} differs from the table's {source.block_size}")
    if request.method not in (None, source.method):
        raise ConfigError(
            f"method={request.method!r} differs from the table's {source.method!r}; replay a trace instead"
        )
    slots, policy = resolve_slots(sparse, source.method, request.slots, request.policy)
    shape = request.model_shape
    if (shape.n_layers, shape.n_kv_heads) != (source.n_layers, source.n_kv_heads):
        raise ConfigError(
            f"model {shape.name} has {shape.n_layers} layers x {shape.n_kv_heads} KV heads, the table "
            f"{source.n_layers} x {source.n_kv_heads}"
        )
    return TableSource(
        source, shape, sparse, slots=slots, policy=policy, device_block_bytes=shape.kv_block_bytes(sparse.block_size)
    )


def _costs(workload: Workload, profile: HardwareProfile, schedule: Schedule) -> StepCosts:
    return schedule.costs(cost_model(workload, profile), workload)


def cost_model(workload: Workload, profile: HardwareProfile) -> CostModel:
    """Costs of the engine's own step where the profile was calibrated on one, else of its kernels."""
    sizes = (
        profile,
        workload.shape,
        workload.sparse,
        workload.method,
        workload.host_block_bytes,
        workload.device_block_bytes,
        workload.storage,
    )
    return CostModel(*sizes) if profile.engine is None else EngineCostModel(*sizes, slots=workload.slots)


def _rules(workload: Workload, schedule: Schedule, profile: HardwareProfile) -> list[str]:
    rules = [*schedule.rules(workload), "transfers of one direction run one after another; prefill is left out"]
    if workload.shape.assumed:
        rules.append(f"sizes of {workload.shape.name} that are assumed: {', '.join(workload.shape.assumed)}")
    if workload.storage is not None:
        rules.append(workload.storage.rule(workload.host_block_bytes, workload.device_block_bytes, profile))
    untimed = [] if profile.engine is None else untimed_matrices(workload.shape, profile.engine)
    if untimed:
        rules.append(
            f"{profile.name} timed no matrices of {workload.shape.name} ({', '.join(untimed)}): the roofline of single "
            "kernels prices them, and nothing says how well its other terms fit this model"
        )
    if profile.link != OWN_LINK:
        rules.append(
            f"link {profile.link} instead of that of {profile.name}, never measured together: "
            + "; ".join(f"{name} {getattr(profile, name):.4g}" for name in LINK_NUMBERS)
            + "; the gather is taken to reach the link's rate, contention with compute to stay as measured"
        )
    return [*rules, *workload.rules]


def _marks(workload: Workload, times: StepTimes, spans: list[list[Span]]) -> Iterator[StepMarks]:
    begin = 0.0
    for index, own in enumerate(spans):
        marks = [(s.track, s.name, s.layer, s.start_us, s.end_us, s.n_bytes) for s in own]
        yield StepMarks(int(workload.loads.steps[index]), begin, marks)
        begin += float(times.step_us[index])


def _write_both(path: str | Path, simulated: list[StepMarks], trace: Trace) -> None:
    """Both runs in one file, the first step that both have at the same place."""
    name, measured = measured_events(trace)
    began: dict[int, float] = {}
    for event in measured:
        if "step" in event.get("args", {}):
            began.setdefault(event["args"]["step"], event["ts"])
    common = next((one for one in simulated if one.step in began), None)
    shift = 0.0 if common is None else began[common.step] - common.begin_us
    moved = [dataclasses.replace(one, begin_us=one.begin_us + max(0.0, shift)) for one in simulated]
    later = [{**event, "ts": event["ts"] + max(0.0, -shift)} for event in measured]
    write_timeline_file(Path(path), side_by_side({"simulated": timeline_events(moved), name: later}))
