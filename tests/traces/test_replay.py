"""Replay: equality at the captured configuration, and other configurations against the plain-Python model."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest

from nosa_sys.errors import CapacityError, ConfigError, TraceError
from nosa_sys.methods import get_method
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.miss_table import MissTable
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.replay import ReplayResult, replay
from nosa_sys.traces.reselect import reselect
from nosa_sys.traces.schema import TraceMeta
from nosa_sys.traces.writer import TraceWriter
from tests.traces.synthetic import SMALL, DictSlots, SyntheticTrace, make_trace, n_windows_at, pooled, select

SEQUENCES = ((40, 25, 0), (3, 40, 2), (64, 12, 1))


def key(row: dict) -> tuple[int, int, int, int]:
    return row["step"], row["sequence"], row["layer"], row["kv_head"]


def lists_of(result: ReplayResult) -> list[list[int]]:
    rows = result.selections
    return [rows.block_ids[a:b].tolist() for a, b in zip(rows.offsets[:-1], rows.offsets[1:], strict=True)]


@pytest.mark.parametrize("method", ["nosa", "dma", "infllmv2", "full"])
@pytest.mark.parametrize(("policy", "slots"), [("exact", 8), ("lru", 8), ("lru", 11), ("beta", 10), ("exact", 12)])
def test_captured_configuration_equals_the_record(tmp_path: Path, method: str, policy: str, slots: int) -> None:
    source = make_trace(method=method, policy=policy, slots=slots, levels=4, sequences=SEQUENCES, seed=5)
    trace = Trace.open(source.write(tmp_path))
    result = replay(trace)
    recorded = sorted(source.tables["selections"], key=key)
    assert result.misses.n_misses.tolist() == [r["n_misses"] for r in recorded]
    assert result.selections.h2d_bytes.tolist() == [r["h2d_bytes"] for r in recorded]
    assert lists_of(result) == [r["block_ids"] for r in recorded]
    assert [None if np.isnan(g) else g for g in result.gamma.tolist()] == [r["gamma"] for r in recorded]
    assert result.misses.h2d_bytes_total == sum(r["h2d_bytes"] for r in recorded)
    assert not result.reselected
    loaded = np.add.reduceat(result.loaded, result.selections.offsets[:-1])
    assert loaded.tolist() == result.misses.n_misses.tolist()


@pytest.mark.parametrize("method", ["nosa", "dma", "infllmv2"])
def test_scores_give_the_recorded_selection(tmp_path: Path, method: str) -> None:
    source = make_trace(method=method, levels=5, sequences=SEQUENCES)
    trace = Trace.open(source.write(tmp_path))
    rows = trace.selections
    again = reselect(trace, rows, trace.meta.sparse, get_method(method))
    assert again.block_ids.tolist() == rows.block_ids.tolist()
    assert again.origins.tolist() == rows.origins.tolist()


def model_replay(source: SyntheticTrace, cfg: SparseConfig, method: str, slots: int, policy: str) -> list[tuple]:
    """(ids, misses) of every row by the plain-Python model, from the trace's scores and betas."""
    betas: dict[tuple, list[float]] = {}
    for row in source.tables["betas"]:
        betas.setdefault((row["sequence"], row["layer"], row["kv_head"]), []).append(row["beta_mean"])
    scores = {key(row): row["window_scores"] for row in source.tables["scores"]}
    caches: dict[tuple, DictSlots] = {}
    out = []
    for row in sorted(source.tables["selections"], key=key):
        stream, position = key(row)[1:], row["position"]
        beta = betas.get(stream, [])
        ids = sorted(select(position, scores[key(row)], beta, cfg, method))
        if row["cold"]:
            caches[stream] = DictSlots(slots, policy, position, cfg.block_size)
        current = position // cfg.block_size
        ranks = {b: pooled(beta, n_windows_at(position, cfg), b, cfg) for b in range(current + 1)}
        out.append((ids, caches[stream].serve(ids, current, row["step"], ranks)))
    return out


@pytest.mark.parametrize(
    "cfg",
    [
        dataclasses.replace(SMALL, topk=6, select_blocks=1),
        dataclasses.replace(SMALL, topk=11),
        dataclasses.replace(SMALL, select_blocks=5),
        dataclasses.replace(SMALL, init_blocks=2, select_blocks=2),
        SparseConfig(8, 4, 2, topk=4, init_blocks=1, window_size=8, select_blocks=2),
        SMALL.with_block_size(2),
        dataclasses.replace(SMALL, window_size=4),
    ],
)
@pytest.mark.parametrize("policy", ["exact", "lru", "beta"])
def test_other_budgets_and_block_sizes(tmp_path: Path, cfg: SparseConfig, policy: str) -> None:
    source = make_trace(sequences=SEQUENCES, seed=2, levels=50)
    trace = Trace.open(source.write(tmp_path))
    slots = cfg.topk + (0 if policy == "exact" else 2)
    result = replay(trace, sparse=cfg, slots=slots, policy=policy)
    expected = model_replay(source, cfg, "nosa", slots, policy)
    assert lists_of(result) == [ids for ids, _ in expected]
    assert result.misses.n_misses.tolist() == [n for _, n in expected]
    assert result.misses.block_bytes == 2 * cfg.block_size * 8 * 4
    assert result.misses.block_size == cfg.block_size
    assert any("queries" in note for note in result.assumptions)


@pytest.mark.parametrize("method", ["dma", "infllmv2"])
def test_other_methods(tmp_path: Path, method: str) -> None:
    source = make_trace(sequences=SEQUENCES, seed=4)
    result = replay(Trace.open(source.write(tmp_path)), method=method)
    expected = model_replay(source, SMALL, method, 8, "exact")
    assert lists_of(result) == [ids for ids, _ in expected]
    assert result.misses.n_misses.tolist() == [n for _, n in expected]


@pytest.mark.parametrize(
    ("captured", "replayed", "head", "warned"),
    [
        ("nosa", "infllmv2", "ed_dma", True),
        ("infllmv2", "nosa", "ed_dma", True),
        ("nosa", "infllmv2", "none", False),
        ("nosa", "dma", "ed_dma", False),
        ("nosa", "full", "ed_dma", False),
    ],
)
def test_a_method_with_another_bias_is_warned_of(
    tmp_path: Path, captured: str, replayed: str, head: str, warned: bool
) -> None:
    trace = Trace.open(make_trace(sequences=SEQUENCES, method=captured).write(tmp_path))
    trace = Trace(trace.directory, dataclasses.replace(trace.meta, head=head))
    warnings = [text for text in replay(trace, method=replayed).assumptions if f"capture {replayed} itself" in text]
    assert bool(warnings) is warned
    assert not any("capture" in text and "itself" in text for text in replay(trace).assumptions)


def test_full_attention_needs_no_scores_and_moves_nothing(tmp_path: Path) -> None:
    source = make_trace(scores=False)
    result = replay(Trace.open(source.write(tmp_path)), method="full")
    assert result.misses.h2d_bytes_total == 0
    assert result.misses.d2h_bytes_total == 0
    rows = sorted(source.tables["selections"], key=key)
    assert lists_of(result) == [list(range(r["position"] // 4 + 1)) for r in rows]


def test_defaults_of_slots_and_policy(tmp_path: Path) -> None:
    trace = Trace.open(make_trace(policy="lru", slots=12).write(tmp_path / "a"))
    same = replay(trace)
    assert (same.slots, same.policy) == (12, "lru")
    smaller = replay(trace, sparse=dataclasses.replace(SMALL, topk=6, select_blocks=1))
    assert (smaller.slots, smaller.policy) == (9, "lru")
    exact = Trace.open(make_trace().write(tmp_path / "b"))
    assert (replay(exact).slots, replay(exact).policy) == (8, "exact")
    assert replay(exact, slots=10).policy == "lru"


def test_refusals_name_value_and_limit(tmp_path: Path) -> None:
    trace = Trace.open(make_trace(scores=False).write(tmp_path))
    with pytest.raises(CapacityError, match="slots=7 is fewer than topk=8"):
        replay(trace, slots=7)
    with pytest.raises(ConfigError, match="'fifo'"):
        replay(trace, policy="fifo")
    with pytest.raises(ConfigError, match="'sparser'"):
        replay(trace, method="sparser")
    with pytest.raises(TraceError, match="--scores"):
        replay(trace, sparse=dataclasses.replace(SMALL, topk=6, select_blocks=2))
    with pytest.raises(TraceError, match="betas"):
        replay(trace, method="dma")
    other_kernel = SparseConfig(4, 8, 4, topk=8, window_size=8, select_blocks=3)
    with pytest.raises(TraceError, match="kernel_size=8 differs"):
        replay(trace, sparse=other_kernel)


def test_missing_scores_and_betas_are_named(tmp_path: Path) -> None:
    cfg = dataclasses.replace(SMALL, topk=6, select_blocks=2)
    source = make_trace()
    lost = source.tables["scores"].pop(5)
    with pytest.raises(TraceError, match=f"step {lost['step']}, sequence {lost['sequence']}.*missing"):
        replay(Trace.open(source.write(tmp_path / "a")), sparse=cfg)
    source = make_trace()
    source.tables["scores"][4]["window_scores"].pop()
    with pytest.raises(TraceError, match="cover 17 windows, its position has 18"):
        replay(Trace.open(source.write(tmp_path / "b")), sparse=cfg)
    source = make_trace()
    source.tables["betas"] = [r for r in source.tables["betas"] if (r["layer"], r["window"]) != (1, 3)]
    with pytest.raises(TraceError, match=r"layer 1.*lack window 3"):
        replay(Trace.open(source.write(tmp_path / "c")), sparse=cfg)


@pytest.mark.parametrize("ids", [[0, 2, 1, 3, 4, 7, 8, 9], [0, 1, 1, 3, 4, 7, 8, 9], [-1, 2, 3, 4, 5, 7, 8, 9]])
def test_broken_selections_are_refused_not_replayed(tmp_path: Path, ids: list[int]) -> None:
    source = make_trace()
    source.rows(step=1, sequence=0)[0]["block_ids"] = ids
    with pytest.raises(TraceError, match="step 1, sequence 0"):
        replay(Trace.open(source.write(tmp_path)))


def test_huge_block_ids_and_duplicate_rows_are_refused(tmp_path: Path) -> None:
    source = make_trace()
    source.rows(step=1)[0]["block_ids"][-1] = 2**31 - 1
    with pytest.raises(TraceError, match="2147483647 is no block"):
        replay(Trace.open(source.write(tmp_path / "a")))
    source = make_trace()
    source.tables["selections"].append(source.tables["selections"][3])
    with pytest.raises(TraceError, match="twice"):
        replay(Trace.open(source.write(tmp_path / "b")))


def test_summary_is_plain_and_leaves_cold_rows_out(tmp_path: Path) -> None:
    source = make_trace(sequences=SEQUENCES)
    summary = replay(Trace.open(source.write(tmp_path))).summary()
    warm = [r for r in source.tables["selections"] if not r["cold"]]
    assert summary["n_misses_warm"] == sum(r["n_misses"] for r in warm)
    assert summary["gamma_macro_mean"] == pytest.approx(sum(r["gamma"] for r in warm) / len(warm))
    blocks = sum(len(r["block_ids"]) for r in warm)
    weighted = sum(r["gamma"] * len(r["block_ids"]) for r in warm) / blocks
    assert summary["gamma_block_weighted_mean"] == pytest.approx(weighted)


def test_empty_trace_replays_to_nothing(tmp_path: Path) -> None:
    meta = TraceMeta.from_dict(make_trace().meta)
    TraceWriter(tmp_path, dataclasses.replace(meta, sequences=())).close()
    for policy in ("exact", "lru", "belady"):
        result = replay(Trace.open(tmp_path), policy=policy)
        assert len(result.misses) == 0
        assert result.summary()["gamma_macro_mean"] is None


def test_worked_example_of_the_documentation(tmp_path: Path) -> None:
    """The table in docs/trace-format.md, row by row."""
    cfg = SparseConfig(4, 4, 2, topk=6, init_blocks=1, window_size=8, select_blocks=2)
    source = make_trace(cfg=cfg, n_layers=1, n_kv_heads=1, sequences=((32, 4, 0),), scores=False)
    table = [  # block ids, misses, gamma
        ([0, 2, 4, 5, 6, 7], 5, None),
        ([0, 2, 3, 6, 7, 8], 1, 4 / 6),
        ([0, 2, 3, 6, 7, 8], 0, 1.0),
        ([0, 2, 4, 6, 7, 8], 1, 5 / 6),
    ]
    for row, (ids, _, _) in zip(source.tables["selections"], table, strict=True):
        row["block_ids"] = ids
    trace = Trace.open(source.write(tmp_path))
    exact = replay(trace)
    assert exact.misses.n_misses.tolist() == [n for _, n, _ in table]
    assert exact.misses.block_bytes == 256
    assert exact.selections.h2d_bytes.tolist() == [1280, 256, 0, 256]
    assert exact.misses.per_layer_step().filled_blocks[:, 0].tolist() == [1, 0, 0, 0]
    assert [None if np.isnan(g) else g for g in exact.gamma.tolist()] == [g for _, _, g in table]
    assert replay(trace, slots=8, policy="lru").misses.n_misses.tolist() == [5, 1, 0, 0]


def test_miss_table_sums(tmp_path: Path) -> None:
    source = make_trace(sequences=SEQUENCES, policy="lru", slots=10)
    trace = Trace.open(source.write(tmp_path))
    table = MissTable.from_trace(trace)
    sums = table.per_layer_step()
    selections = source.tables["selections"]
    assert sums.steps.tolist() == sorted({r["step"] for r in selections})
    for i, step in enumerate(sums.steps.tolist()):
        rows = source.rows(step=step)
        assert sums.n_sequences[i] == len({r["sequence"] for r in rows})
        assert sums.context_tokens[i] == sum({r["sequence"]: r["position"] + 1 for r in rows}.values())
        assert sums.cold[i] == any(r["cold"] for r in rows)
        for layer in range(2):
            own = source.rows(step=step, layer=layer)
            assert sums.misses[i, layer] == sum(r["n_misses"] for r in own)
            assert sums.attended_blocks[i, layer] == sum(len(r["block_ids"]) for r in own)
            assert sums.filled_blocks[i, layer] == sum((r["position"] + 1) % 4 == 0 for r in own)
    whole = [r for r in source.tables["steps"] if r["layer"] == -1]
    assert table.h2d_bytes_total == sum(r["h2d_bytes"] for r in whole)
    assert table.d2h_bytes_total == sum(r["d2h_bytes"] for r in whole)


def test_miss_table_refuses_layers_that_the_model_lacks(tmp_path: Path) -> None:
    source = make_trace()
    source.tables["selections"][3]["layer"] = 2
    with pytest.raises(TraceError, match=r"layer=2 is outside \[0, 2\)"):
        MissTable.from_trace(Trace.open(source.write(tmp_path)))


def test_ten_settings_of_a_demo_sized_trace_take_seconds(tmp_path: Path) -> None:
    """64 steps x 30 layers x 3 heads; the bound is generous for a busy machine."""
    cfg = SparseConfig(topk=16, window_size=128, select_blocks=4)
    rng = np.random.default_rng(0)
    meta = TraceMeta.from_dict({**make_trace().meta, "sparse": cfg.to_dict(), "sequences": [], "slots": 16})
    model = dataclasses.replace(meta.model, n_layers=30, n_q_heads=9, n_kv_heads=3)
    layers, heads = np.divmod(np.arange(90), 3)
    with TraceWriter(tmp_path, dataclasses.replace(meta, model=model)) as writer:
        for step in range(64):
            current = (4096 + step) // 64
            free = [np.sort(rng.choice(np.arange(1, current - 2), 13, replace=False)) for _ in range(90)]
            ids = [np.concatenate([[0], f, [current - 1, current]]) for f in free]
            n = np.full(90, 0)
            writer.add(
                "selections",
                {
                    "step": n + step,
                    "position": n + 4096 + step,
                    "sequence": n,
                    "layer": layers,
                    "kv_head": heads,
                    "block_ids": ids,
                    "origins": [np.zeros(16, dtype=np.int8)] * 90,
                    "n_misses": n,
                    "h2d_bytes": n,
                    "cold": n + step == 0,
                },
            )
    trace = Trace.open(tmp_path)
    begin = time.perf_counter()
    for slots in (16, 20, 24, 32):
        misses = [int(replay(trace, slots=slots, policy=p).misses.n_misses.sum()) for p in ("lru", "belady")]
        assert misses[1] <= misses[0]
    assert time.perf_counter() - begin < 30
