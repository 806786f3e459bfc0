"""From a recipe to rows: every configuration resolved or refused, grouped by the replay that they share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nosa_sys.errors import ConfigError, NosaError
from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.simulator.hardware import HardwareProfile, load_hardware
from nosa_sys.simulator.host_storage import HostStorage, host_storage
from nosa_sys.simulator.recipe import Recipe
from nosa_sys.simulator.sources import Request, SyntheticWorkload
from nosa_sys.slot_count import slots_of
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.schema import TraceMeta


@dataclass(frozen=True)
class Configuration:
    """One row to be: the axis values as written, and what they resolve to, or why they are refused."""

    index: int
    values: dict[str, Any]
    request: Request | None
    hardware: HardwareProfile
    refused: str = ""


@dataclass(frozen=True)
class Group:
    """Configurations that share one selection of blocks; within it, sorted so that one replay serves neighbours."""

    number: int
    configurations: list[Configuration] = field(default_factory=list)


def base_workload(recipe: Recipe) -> SyntheticWorkload | str:
    """The synthetic workload that a recipe describes, or the directory of its trace."""
    synthetic = recipe.base.synthetic
    if synthetic is None:
        return str(recipe.base.trace)
    return SyntheticWorkload(
        shape=ModelShape.resolve(synthetic.model_shape),
        sparse=SparseConfig(**synthetic.sparse.model_dump(exclude_none=True)),
        context=synthetic.context,
        batch=synthetic.batch,
        steps=recipe.steps or synthetic.steps,
        method=synthetic.method,
        locality=synthetic.build_locality(),
        distinct_sequences=synthetic.distinct_sequences,
    )


def profiles(recipe: Recipe) -> dict[tuple[str | None, str | None], HardwareProfile]:
    """Every device of a recipe on every link, by their names as written."""
    axes = recipe.axes.given()
    found = {
        (name, link): load_hardware(name).with_link(link)
        for name in axes.get("hardware", [recipe.hardware])
        for link in axes.get("link", [recipe.link])
    }
    return {key: profile.extrapolating() for key, profile in found.items()} if recipe.extrapolate else found


def plan(recipe: Recipe, meta: TraceMeta | None) -> list[Group]:
    """All configurations of a recipe in groups. ``meta`` is that of the base trace, None for a synthetic base.

    Raises NosaError for what no configuration can survive: an unknown model, hardware or policy, no bandwidth.
    """
    axes = recipe.axes.given()
    hardware = profiles(recipe)
    for name in axes.get("host_kv_dtype", [recipe.host_kv_dtype]):
        host_storage(name)
    bandwidth_given = recipe.h2d_gbps is not None or "h2d_gbps" in recipe.names()
    for profile in hardware.values():
        if not bandwidth_given:
            _ = profile.link_gbps
    shapes = {name: ModelShape.resolve(name) for name in axes.get("model_shape", [])}
    for name in axes.get("method", []):
        get_method(name)
    for policy in axes.get("policy", []):
        Request(policy=policy)
    if meta is not None:
        base_sparse, base_method = meta.sparse, meta.method
    else:
        base = base_workload(recipe)
        if isinstance(base, str):
            raise ConfigError(f"the trace {base} was not opened")
        base_sparse, base_method = base.sparse, base.method
    groups: dict[tuple[Any, ...], Group] = {}
    for index, values in enumerate(recipe.configurations()):
        profile = hardware[values.get("hardware", recipe.hardware), values.get("link", recipe.link)]
        profile = profile.with_h2d_gbps(values.get("h2d_gbps", recipe.h2d_gbps))
        try:
            request = _resolve(values, base_sparse, base_method, shapes, recipe)
            configuration = Configuration(index, values, request, profile)
            key: tuple[Any, ...] = (request.model_shape, request.sparse, request.method, request.context)
            if meta is not None:  # a replay selects anew for every slot count and policy, so these share nothing
                key += (request.slots, request.policy)
        except NosaError as error:
            configuration = Configuration(index, values, None, profile, str(error))
            key = ()
        group = groups.setdefault(key, Group(len(groups)))
        group.configurations.append(configuration)
    for group in groups.values():
        group.configurations.sort(key=_shared_first)
    return list(groups.values())


def _shared_first(configuration: Configuration) -> tuple[Any, ...]:
    request = configuration.request
    if request is None:
        return (0, "", 0, configuration.index)
    return (request.slots or 0, request.policy or "", request.batch or 0, configuration.index)


def _resolve(
    values: dict[str, Any],
    base_sparse: SparseConfig,
    base_method: str,
    shapes: dict[str, ModelShape],
    recipe: Recipe,
) -> Request:
    """A request from axis values: block size keeps token budgets, topk keeps ratios, k_e sets select_blocks."""
    sparse = base_sparse
    if "block_size" in values:
        sparse = sparse.with_block_size(values["block_size"])
    if "topk" in values:
        sparse = sparse.with_topk(values["topk"])
    if "k_e" in values:
        sparse = sparse.with_k_e(values["k_e"])
    if "select_blocks" in values:
        sparse = sparse.with_k_e(sparse.topk - values["select_blocks"])
    method = values.get("method")
    variant = get_method(method or base_method)
    variant.check(sparse)
    slots = None
    if "slots" in values and not variant.dense:
        slots = slots_of(values["slots"], sparse.topk)
        if slots < sparse.topk:
            raise ConfigError(
                f"slots={values['slots']} is fewer than topk={sparse.topk}; a multiple is written as 1.25x"
            )
        if values.get("policy") == "exact" and slots != sparse.topk:
            raise ConfigError(
                f"policy exact keeps topk={sparse.topk} blocks, so slots={slots} would stay empty; use lru"
            )
    return Request(
        model_shape=shapes.get(values.get("model_shape", "")),
        context=values.get("context"),
        batch=values.get("batch"),
        steps=recipe.steps,
        sparse=sparse if sparse != base_sparse else None,
        method=method if method != base_method else None,
        slots=slots,
        policy=None if variant.dense else values.get("policy"),
        seed=recipe.seed,
        storage=_storage(values, recipe),
    )


def _storage(values: dict[str, Any], recipe: Recipe) -> HostStorage | None:
    """The host's format; what converting costs belongs to every row that has one."""
    name = values.get("host_kv_dtype", recipe.host_kv_dtype)
    return None if name is None else host_storage(name, recipe.dequant_gbps, recipe.dequant_fixed_us)
