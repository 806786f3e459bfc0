"""check_trace: one mutation per rule must be named with its row; valid and plausibly foreign traces pass."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nosa_sys.traces.check import check_trace
from nosa_sys.traces.findings import MAX_PER_RULE, CheckReport
from nosa_sys.traces.reader import Trace
from tests.traces.synthetic import SMALL, SyntheticTrace, make_trace, n_windows_at, pooled

SEQUENCES = ((40, 14, 0), (3, 40, 2))


def report_of(source: SyntheticTrace, directory: Path) -> CheckReport:
    return check_trace(Trace.open(source.write(directory)))


@pytest.mark.parametrize("method", ["nosa", "dma", "infllmv2", "full"])
@pytest.mark.parametrize(("policy", "slots"), [("exact", 8), ("lru", 8), ("lru", 11), ("beta", 10)])
@pytest.mark.parametrize("scores", [True, False])
def test_valid_traces_pass(tmp_path: Path, method: str, policy: str, slots: int, scores: bool) -> None:
    source = make_trace(method=method, policy=policy, slots=slots, scores=scores, sequences=SEQUENCES, levels=4)
    report = report_of(source, tmp_path)
    assert report.ok, [str(p) for p in report.problems]
    assert report.n_rows == len(source.tables["selections"])
    assert report.facts["n_rows_recounted"] == report.n_rows
    if scores and method != "full":
        assert report.facts["n_rows_reselected"] > 50


# ---- one mutation per rule. Each takes the trace and returns (table, row index or None)
Mutation = Callable[[SyntheticTrace], tuple[str, int | None]]


def find(source: SyntheticTrace, wanted: Callable[[dict[str, Any]], bool], table: str = "selections") -> int:
    return next(i for i, row in enumerate(source.tables[table]) if wanted(row))


def warm_sparse(row: dict[str, Any]) -> bool:
    return row["sequence"] == 0 and not row["cold"] and row["step"] == 6


def setting(table: str, column: str, value: Any, wanted: Callable[[dict[str, Any]], bool] = warm_sparse) -> Mutation:
    """Set a column of the first matching row; a callable value gets the old one."""

    def mutate(source: SyntheticTrace) -> tuple[str, int | None]:
        at = find(source, wanted, table)
        row = source.tables[table][at]
        row[column] = value(row[column]) if callable(value) else value
        return table, at

    return mutate


def meta_setting(key: str, value: Any) -> Mutation:
    def mutate(source: SyntheticTrace) -> tuple[str, int | None]:
        source.meta[key] = value
        return "meta", None

    return mutate


def swap_free_block(source: SyntheticTrace) -> tuple[str, int | None]:
    """Replace a query-agnostic pick by a block that is not selected, everything else left consistent."""
    at = find(source, warm_sparse)
    row = source.tables["selections"][at]
    ids, origins = row["block_ids"], row["origins"]
    out = next(b for b, o in zip(ids, origins, strict=True) if o == 3)
    new = next(b for b in range(row["position"] // 4 + 1) if b not in ids)
    pairs = sorted((new if b == out else b, o) for b, o in zip(ids, origins, strict=True))
    row["block_ids"], row["origins"] = [b for b, _ in pairs], [o for _, o in pairs]
    return "selections", at


def drop_core_block(source: SyntheticTrace) -> tuple[str, int | None]:
    """Replace the candidate of the highest pooled beta by a block that is not selected."""
    at = find(source, warm_sparse)
    row = source.tables["selections"][at]
    ids, current = row["block_ids"], row["position"] // 4
    stream = {k: row[k] for k in ("sequence", "layer", "kv_head")}
    betas = [r["beta_mean"] for r in source.tables["betas"] if all(r[k] == v for k, v in stream.items())]
    n_windows = n_windows_at(row["position"], SMALL)
    candidates = range(1, current - 2)
    out = max(candidates, key=lambda b: pooled(betas, n_windows, b, SMALL))
    new = next(b for b in candidates if b not in ids)
    origin = row["origins"][ids.index(out)]
    pairs = [(b, o) for b, o in zip(ids, row["origins"], strict=True) if b != out]
    pairs = sorted([*pairs, (new, origin)])
    row["block_ids"], row["origins"] = [b for b, _ in pairs], [o for _, o in pairs]
    return "selections", at


def swap_query_block(source: SyntheticTrace) -> tuple[str, int | None]:
    at = find(source, warm_sparse)
    row = source.tables["selections"][at]
    place = row["origins"].index(2)
    other = row["origins"].index(3)
    row["origins"][place], row["origins"][other] = 3, 2
    return "selections", at


def drop_window_block(source: SyntheticTrace) -> tuple[str, int | None]:
    at = find(source, warm_sparse)
    row = source.tables["selections"][at]
    current = row["position"] // 4
    new = next(b for b in range(current) if b not in row["block_ids"])
    row["block_ids"] = sorted([new if b == current - 1 else b for b in row["block_ids"]])
    return "selections", at


def disjoint_selection(source: SyntheticTrace) -> tuple[str, int | None]:
    """Free picks as far as possible from the step before: breaks the guarantee."""
    at = find(source, warm_sparse)
    row = source.tables["selections"][at]
    before = source.rows(step=5, sequence=0, layer=row["layer"], kv_head=row["kv_head"])[0]["block_ids"]
    current = row["position"] // 4
    forced = {0, current - 2, current - 1, current}
    free = sorted((b for b in range(current) if b not in forced), key=lambda b: b in before)[:4]
    row["block_ids"] = sorted(forced | set(free))
    row["origins"] = [0 if b == 0 else 1 if b in forced else 2 if b in free[:2] else 3 for b in row["block_ids"]]
    return "selections", at


def duplicate(table: str, at: int) -> Mutation:
    def mutate(source: SyntheticTrace) -> tuple[str, int | None]:
        source.tables[table].append(dict(source.tables[table][at]))
        return table, len(source.tables[table]) - 1

    return mutate


def drop(table: str, wanted: Callable[[dict[str, Any]], bool], reported: tuple[str, int | None]) -> Mutation:
    def mutate(source: SyntheticTrace) -> tuple[str, int | None]:
        del source.tables[table][find(source, wanted, table)]
        return reported

    return mutate


def add_one(value: int) -> int:
    return value + 1


def one_less(values: list) -> list:
    return values[:-1]


def whole_step(row: dict[str, Any]) -> bool:
    return row["step"] == 6 and row["layer"] == -1


def one_layer(row: dict[str, Any]) -> bool:
    return row["step"] == 6 and row["layer"] == 1


def anything(row: dict[str, Any]) -> bool:
    return True


def cold_row(row: dict[str, Any]) -> bool:
    return row["cold"]


def late_beta(row: dict[str, Any]) -> bool:
    return row["window"] == 3


MUTATIONS: list[tuple[str, Mutation]] = [
    ("key-range", setting("selections", "step", -1)),
    ("key-range", setting("selections", "position", -5)),
    ("key-range", setting("selections", "sequence", -1)),
    ("key-range", setting("selections", "layer", 2)),
    ("key-range", setting("selections", "layer", -1)),
    ("key-range", setting("selections", "kv_head", 2)),
    ("duplicate-row", duplicate("selections", 11)),
    ("missing-row", drop("selections", lambda r: warm_sparse(r) and r["kv_head"] == 1, ("selections", 40))),
    ("one-position", setting("selections", "position", add_one)),
    ("consecutive-positions", setting("selections", "position", 2**31 - 1)),
    ("cold-first", setting("selections", "cold", True)),
    ("cold-first", setting("selections", "cold", False, cold_row)),
    ("known-sequence", setting("selections", "sequence", 77)),
    ("origins-length", setting("selections", "origins", one_less)),
    ("ids-range", setting("selections", "block_ids", lambda ids: [*ids[:-1], 2**31 - 1])),
    ("ids-range", setting("selections", "block_ids", lambda ids: [*ids[:-1], ids[-1] + 1])),
    ("ids-range", setting("selections", "block_ids", lambda ids: [-1, *ids[1:]])),
    ("ids-ascending", setting("selections", "block_ids", lambda ids: [ids[0], ids[2], ids[1], *ids[3:]])),
    ("ids-ascending", setting("selections", "block_ids", lambda ids: [ids[0], ids[1], ids[1], *ids[3:]])),
    ("forced", drop_window_block),
    ("origins", setting("selections", "origins", lambda o: [5, *o[1:]])),
    ("origins", setting("selections", "origins", lambda o: [1, *o[1:]])),
    ("origins", setting("selections", "origins", lambda o: [2 if x == 3 else x for x in o])),
    ("origins", setting("selections", "origins", lambda o: [0] * len(o), lambda r: r["sequence"] == 1)),
    ("misses-range", setting("selections", "n_misses", -1)),
    ("misses-range", setting("selections", "n_misses", 9, cold_row)),
    ("misses", setting("selections", "n_misses", lambda n: n - 1 if n else 1)),
    ("h2d-bytes", setting("selections", "h2d_bytes", add_one)),
    ("h2d-bytes", setting("selections", "h2d_bytes", 0, cold_row)),
    ("gamma", setting("selections", "gamma", lambda g: g - 0.01)),
    ("gamma-null", setting("selections", "gamma", None)),
    ("gamma-null", setting("selections", "gamma", 1.0, cold_row)),
    ("loads-bound", setting("selections", "n_misses", 3)),
    ("loads-bound", disjoint_selection),
    ("overlap-bound", disjoint_selection),
    ("core", drop_core_block),
    ("selection", swap_free_block),
    ("selection", swap_query_block),
    ("key-range", setting("steps", "step", -3, whole_step)),
    ("key-range", setting("steps", "layer", 2, one_layer)),
    ("key-range", setting("steps", "layer", -2, one_layer)),
    ("duplicate-row", duplicate("steps", 4)),
    ("step-missing", drop("steps", whole_step, ("selections", 40))),
    ("sum-n-sequences", setting("steps", "n_sequences", add_one, whole_step)),
    ("sum-n-misses", setting("steps", "n_misses", add_one, whole_step)),
    ("sum-n-misses", setting("steps", "n_misses", add_one, one_layer)),
    ("sum-h2d-bytes", setting("steps", "h2d_bytes", add_one, one_layer)),
    ("sum-d2h-bytes", setting("steps", "d2h_bytes", add_one, one_layer)),
    ("prefetch-bytes", setting("steps", "prefetch_bytes", 256, one_layer)),
    ("prefetch-bytes", setting("steps", "wasted_prefetch_bytes", 256, one_layer)),
    ("times", setting("steps", "time_us", -1.0, whole_step)),
    ("times", setting("steps", "select_us", float("inf"), whole_step)),
    ("times", setting("steps", "h2d_us", -0.5, whole_step)),
    ("times", setting("steps", "attention_us", -0.5, whole_step)),
    ("times", setting("steps", "other_us", -0.5, whole_step)),
    ("duplicate-row", duplicate("scores", 4)),
    ("unknown-row", setting("scores", "step", 500, anything)),
    ("n-windows", setting("scores", "window_scores", one_less, anything)),
    ("score-range", setting("scores", "window_scores", lambda s: [float("nan"), *s[1:]], anything)),
    ("score-range", setting("scores", "window_scores", lambda s: [-0.1, *s[1:]], anything)),
    ("score-range", setting("scores", "window_scores", lambda s: [2.1, *s[1:]], anything)),
    ("key-range", setting("betas", "window", -1, late_beta)),
    ("key-range", setting("betas", "kv_head", 7, late_beta)),
    ("duplicate-row", duplicate("betas", 4)),
    ("beta-finite", setting("betas", "beta_mean", float("inf"), late_beta)),
    ("incomplete-window", setting("betas", "window", 2000, late_beta)),
    ("missing-window", drop("betas", late_beta, ("betas", None))),
    ("key-range", setting("prefill", "layer", 9, anything)),
    ("duplicate-row", duplicate("prefill", 1)),
    ("n-tokens", setting("prefill", "n_tokens", -1, anything)),
    ("n-tokens", setting("prefill", "n_tokens", add_one, anything)),
    ("prefill-bytes", setting("prefill", "d2h_bytes", add_one, anything)),
    ("prefill-bytes", setting("prefill", "h2d_bytes", -256, anything)),
    ("times", setting("prefill", "time_us", float("inf"), anything)),
    ("n-steps", meta_setting("n_steps", 3)),
    ("slots", meta_setting("slots", 7)),
]


@pytest.mark.parametrize(("rule", "mutate"), MUTATIONS, ids=[f"{i}-{rule}" for i, (rule, _) in enumerate(MUTATIONS)])
def test_each_corruption_is_named_with_its_row(tmp_path: Path, rule: str, mutate: Mutation) -> None:
    source = make_trace(sequences=SEQUENCES, seed=3)
    table, row = mutate(source)
    report = report_of(source, tmp_path)
    named = {(p.table, p.row) for p in report.problems if p.rule == rule}
    assert (table, row) in named, (rule, table, row, [str(p) for p in report.problems])
    assert report.counts[rule] >= 1


GUARANTEES = {"loads-bound", "overlap-bound", "core", "selection"}


@pytest.mark.parametrize(("rule", "mutate"), [m for m in MUTATIONS if m[0] not in ("origins", "status")])
def test_injected_selections_are_held_to_all_but_the_guarantees(tmp_path: Path, rule: str, mutate: Mutation) -> None:
    source = make_trace(sequences=SEQUENCES, seed=3)
    source.meta["status"] = "injected: 2 misses a head"
    table, row = mutate(source)
    report = report_of(source, tmp_path)
    assert report.facts["status"] == "injected: 2 misses a head"
    if rule in GUARANTEES:
        assert not GUARANTEES & set(report.counts)
        assert "injected" in report.facts["guarantee"]
    else:
        assert (table, row) in {(p.table, p.row) for p in report.problems if p.rule == rule}


@pytest.mark.parametrize(("origin", "ok"), [(0, True), (4, True), (5, False), (-1, False)])
def test_injected_selections_may_be_of_any_origin(tmp_path: Path, origin: int, ok: bool) -> None:
    source = make_trace(sequences=SEQUENCES)
    source.meta["status"] = "injected"
    setting("selections", "origins", lambda origins: [origin] * len(origins))(source)
    assert report_of(source, tmp_path).ok == ok


def test_budget_rule_and_long_lists(tmp_path: Path) -> None:
    for name, change in (("short", lambda ids: ids[:-1]), ("long", lambda ids: [*ids, *range(100, 100_100)])):
        source = make_trace()
        row = source.tables["selections"][9]
        row["block_ids"], row["origins"] = change(row["block_ids"]), change(row["origins"])
        row["origins"] = [min(o, 4) for o in row["origins"]]
        problems = report_of(source, tmp_path / name).problems
        assert ("budget", 9) in {(p.rule, p.row) for p in problems}


def test_sequence_facts_of_meta_are_checked(tmp_path: Path) -> None:
    for key, rule in (("prompt_tokens", "first-position"), ("new_tokens", "new-tokens")):
        source = make_trace()
        source.meta["sequences"][1][key] += 1
        assert rule in report_of(source, tmp_path / key).counts


def test_unreadable_tables_are_problems_not_crashes(tmp_path: Path) -> None:
    for name in ("selections", "steps", "scores", "betas", "prefill"):
        directory = make_trace().write(tmp_path / name)
        path = directory / name / "part-00000.parquet"
        path.write_bytes(path.read_bytes()[:-9])
        report = check_trace(Trace.open(directory))
        assert [(p.table, p.rule) for p in report.problems] == [(name, "schema")]


def test_problems_of_one_rule_are_capped_but_counted(tmp_path: Path) -> None:
    source = make_trace(sequences=((40, 80, 0),), scores=False)
    for row in source.tables["selections"]:
        row["h2d_bytes"] += 1
    report = report_of(source, tmp_path)
    assert report.counts["h2d-bytes"] == len(source.tables["selections"])
    assert sum(p.rule == "h2d-bytes" for p in report.problems) == MAX_PER_RULE


# ---- foreign traces that vary where they may
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_foreign_cold_rows_may_count_any_misses(tmp_path: Path, share: float) -> None:
    source = make_trace(scores=False)
    del source.tables["prefill"]
    for row in source.tables["selections"]:
        if row["cold"]:
            row["n_misses"] = int(share * len(row["block_ids"]))
            row["h2d_bytes"] = row["n_misses"] * 256
    resum(source)
    report = report_of(source, tmp_path)
    assert report.ok, [str(p) for p in report.problems]


def resum(source: SyntheticTrace) -> None:
    for row in source.tables["steps"]:
        layer = {} if row["layer"] < 0 else {"layer": row["layer"]}
        row["n_misses"] = sum(r["n_misses"] for r in source.rows(step=row["step"], **layer))
        row["h2d_bytes"] = row["n_misses"] * 256


def test_foreign_whole_step_rows_alone_and_shuffled_rows_pass(tmp_path: Path) -> None:
    source = make_trace(sequences=SEQUENCES)
    source.tables["steps"] = [r for r in source.tables["steps"] if r["layer"] == -1]
    source.tables["selections"].reverse()
    source.tables["scores"] = source.tables["scores"][::3]
    source.meta["sequences"] = []
    report = report_of(source, tmp_path)
    assert report.ok, [str(p) for p in report.problems]


def test_foreign_lru_that_seats_the_first_selection_in_id_order_passes(tmp_path: Path) -> None:
    """No partial block held in slot 0: victims of equal rank may then leave in another order."""
    cfg = dataclasses.replace(SMALL, select_blocks=3)
    for seed in range(6):
        source = make_trace(cfg=cfg, sequences=((39, 20, 0),), policy="lru", slots=10, seed=seed, in_id_order=True)
        report = report_of(source, tmp_path / str(seed))
        assert report.ok, [str(p) for p in report.problems]


def test_prefetching_or_clairvoyant_runs_are_not_recounted(tmp_path: Path) -> None:
    for key, value in (("schedule", "prefetch"), ("policy", "belady")):
        source = make_trace(slots=12)
        source.meta[key] = value
        for row in source.tables["selections"]:
            if not row["cold"]:
                row["n_misses"] = row["h2d_bytes"] = 0
        resum(source)
        report = report_of(source, tmp_path / value)
        assert report.ok, [str(p) for p in report.problems]
        assert "not derivable" in report.facts["misses_recounted"]


def test_report_is_plain_data(tmp_path: Path) -> None:
    report = report_of(make_trace(sequences=SEQUENCES), tmp_path)
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["ok"] is True
    assert data["facts"]["locality"]["max_loads"] <= data["facts"]["locality"]["loads_bound"] == 2
    assert data["facts"]["locality"]["gamma_min"] >= data["facts"]["gamma_floor"] == 0.625
