"""``nosa replay``: a captured trace under other budgets, slot counts and eviction policies."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

from nosa_sys.cli import console as out
from nosa_sys.cli.budgets import resolve_budgets
from nosa_sys.cli.options import BudgetFlags, CacheFlags, ConfigFile, DryRun, JsonFlag, Overwrite, field_names, grouped
from nosa_sys.cli.settings import Settings, read_yaml_mapping
from nosa_sys.experiments.replays import ReplayRequest, default_policy, default_slots, replay_document
from nosa_sys.outputs import check_output, whole_directory
from nosa_sys.slot_count import slots_of
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.schema import TraceMeta

NAME = "replay"


@grouped
def command(
    trace: Annotated[Path, typer.Argument(metavar="DIR", help="A trace directory.")],
    budgets: BudgetFlags,
    cache: CacheFlags,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Also write DIR/replay.json for reports.")] = None,
    config: ConfigFile = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: JsonFlag = False,
) -> None:
    """Replay a trace under other budgets, block sizes, slots and policies (queries unchanged).

    Example: [bold]nosa replay out/trace --slots 24 --policy lru[/bold]
    """
    meta = TraceMeta.load(trace)
    settings, request = resolve(trace, meta, budgets, cache, config)
    settings.banner(out.stderr(), f"replay {trace}")
    if out_dir is not None:
        check_output(out_dir, overwrite=overwrite, reads=trace)
    if dry_run:
        if json:
            out.print_json({"options": settings.to_dict(), "dry_run": True})
        return
    document = {**replay_document(request), "options": settings.to_dict()}
    if out_dir is not None:
        with whole_directory(out_dir, overwrite=overwrite) as partial:
            text = json_module.dumps(out.plain(document), indent=1, allow_nan=False)
            (partial / "replay.json").write_text(text + "\n", encoding="utf-8")
    out.human(json).print(summary_table(document))
    for note in document["assumptions"]:
        out.stderr().print(f"assumption: {note}", style="dim")
    if json:
        out.print_json(document)


def resolve(
    trace: Path, meta: TraceMeta, budgets: BudgetFlags, cache: CacheFlags, config: Path | None
) -> tuple[Settings, ReplayRequest]:
    """Flags over file over the trace's own settings."""
    known = field_names(BudgetFlags, CacheFlags)
    settings = Settings(read_yaml_mapping(config, known) if config else {})
    settings.note("trace", str(trace), "flag")
    sparse = resolve_budgets(budgets, settings, meta.sparse, "trace")
    method = settings.pick("method", cache.method, meta.method, "trace")
    slots, policy = resolve_cache(settings, cache, meta, sparse, method)
    settings.note("bytes per block", f"{meta.model.kv_block_bytes(sparse.block_size, meta.host_kv_dtype):,}", "derived")
    return settings, ReplayRequest(trace=trace, sparse=sparse, method=method, slots=slots, policy=policy)


def resolve_cache(
    settings: Settings, cache: CacheFlags, meta: TraceMeta, sparse: SparseConfig, method: str
) -> tuple[int, str]:
    """(slots, policy): as captured where the budgets are, else the captured ratio slots / k and a fitting policy."""
    same = sparse == meta.sparse and method == meta.method
    given, origin = settings.find("slots", cache.slots, None)
    slots = default_slots(meta, sparse) if given is None else slots_of(given, sparse.topk)
    settings.note("slots", slots, origin or ("trace" if same else "derived"))
    kept = same and slots == meta.slots
    policy = meta.policy if kept else default_policy(meta, sparse, slots)
    return slots, settings.pick("policy", cache.policy, policy, "trace" if kept else "derived")


def summary_table(document: dict[str, Any]) -> Any:
    """One replay as a table of figures."""
    rows = [
        ("misses per head and step (cold steps apart)", document["misses_per_head_step"]),
        ("miss ratio", document["miss_ratio"]),
        ("share of zero-miss head steps", document["zero_miss_share"]),
        ("gamma, macro mean", document["gamma_macro"]),
        ("gamma, block-weighted mean", document["gamma_weighted"]),
        ("guaranteed gamma k_e/k", document["guaranteed_gamma"]),
        ("H2D bytes per step", document["h2d_bytes_per_step"]),
        ("H2D bytes in all, cold steps included", document["h2d_bytes_total"]),
    ]
    title = f"{document['method']}, k={document['sparse']['topk']}, slots={document['slots']}, {document['policy']}"
    return out.table(title, ("figure", "value"), rows)
