"""Replays against live captures: exact where nothing can differ, and different where something can."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from nosa_sys.errors import ConfigError, TraceError
from nosa_sys.experiments import replay_check
from nosa_sys.experiments.capture import CaptureRequest, open_model
from nosa_sys.experiments.replay_check import ReplayCheck, Setting, main, settings_around
from nosa_sys.experiments.replay_figures import compare, same_blocks, standard_error
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.replay import replay
from nosa_sys.traces.rows import SelectionRows
from tests.cli.tiny_checkpoint import write_checkpoint

BASE = SparseConfig(16, 16, 8, topk=12, init_blocks=1, window_size=32, select_blocks=4)
TEXT = "".join(f"{n} squared is {n * n}. " for n in range(50))
PROMPT, STEPS = 450, 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


def make_check(checkpoint: Path, out: Path, *, deaf: bool = False) -> ReplayCheck:
    """``deaf``: attention adds nothing to the hidden states, so no selection can change a later query."""
    loaded = open_model(CaptureRequest(BASE, (TEXT,), 1, model=str(checkpoint)))
    if deaf:
        for layer in loaded.model.layers:
            layer.o.zero_()
    return ReplayCheck(out, TEXT, BASE, loaded, PROMPT, STEPS, say=lambda _: None)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as handle:
        return list(csv.DictReader(handle))


def assert_equal(ours: SelectionRows, live: SelectionRows) -> None:
    order = np.lexsort((live.kv_head, live.layer, live.sequence, live.step))
    live = live.take(order)
    for name in ("step", "position", "layer", "kv_head", "offsets", "block_ids", "origins", "n_misses", "h2d_bytes"):
        assert getattr(ours, name).tolist() == getattr(live, name).tolist(), name
    np.testing.assert_array_equal(ours.gamma, live.gamma)


def test_settings_cover_budgets_blocks_methods_and_slots() -> None:
    found = {
        (s.sparse.topk, s.sparse.select_blocks, s.sparse.block_size, s.method, s.slots) for s in settings_around(BASE)
    }
    assert len(found) == 24
    for wanted in (
        (12, 4, 16, "nosa", 12),
        (12, 4, 16, "nosa", 15),
        (6, 2, 16, "nosa", 8),
        (24, 8, 16, "infllmv2", 24),
        (12, 2, 16, "nosa", 12),
        (12, 8, 16, "nosa", 15),
        (24, 8, 8, "infllmv2", 30),
        (6, 2, 32, "nosa", 6),
    ):
        assert wanted in found, wanted


def test_replay_equals_live_where_attention_cannot_be_heard(checkpoint: Path, tmp_path: Path) -> None:
    """With o_proj zero the queries, keys and betas of every setting are those of the base: replay is exact."""
    check = make_check(checkpoint, tmp_path, deaf=True)
    settings = [s for s in settings_around(BASE) if s.slot_ratio == 1.0 or s.name in ("base", "k-6")]
    source = check.capture(Setting("base", BASE))
    moved = 0
    for setting in settings:
        live = check.capture(setting)
        result = replay(
            source, sparse=setting.sparse, method=setting.method, slots=setting.slots, policy=setting.policy
        )
        assert_equal(result.selections, live.selections)
        moved += int(live.selections.n_misses[~live.selections.cold].sum())
    assert moved > 500, "a run without misses would show nothing"
    check.run(settings)
    assert {row["result"] for row in rows_of(tmp_path / "replay_check.csv")} == {"pass"}
    assert {row["same_rows"] for row in rows_of(tmp_path / "replay_check.csv")} == {"1"}


@pytest.fixture(scope="module")
def ordinary(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> ReplayCheck:
    check = make_check(checkpoint, tmp_path_factory.mktemp("check"))
    base = Setting("base", BASE)
    check.run([base, Setting("k-6", BASE.with_topk(6)), Setting("block-8", BASE.with_block_size(8), "infllmv2")])
    return check


def test_replay_at_the_captured_setting_equals_the_capture(ordinary: ReplayCheck) -> None:
    live = ordinary.capture(Setting("base", BASE))
    assert_equal(replay(live).selections, live.selections)
    row = ordinary.rows[0]
    assert (row["same_rows"], row["misses_diff"], row["gamma_macro_diff"], row["result"]) == (1.0, 0.0, 0.0, "pass")


def test_an_ordinary_model_differs_below_its_first_layer_alone(ordinary: ReplayCheck) -> None:
    for row in ordinary.rows[1:]:
        assert row["same_rows_first_layer"] == 1.0
        assert row["same_rows"] < 1.0
    layers = [r for r in rows_of(ordinary.directory / "replay_check_layers.csv") if "k-6" in r["setting"]]
    assert [r["layer"] for r in layers] == ["0", "1"]
    assert float(layers[0]["same_rows"]) == 1.0 > float(layers[1]["same_rows"])
    text = (ordinary.directory / "replay_check.md").read_text()
    assert "nosa-k-6-slots-1.00" in text
    assert "SHA-256" in text


def test_a_failed_setting_stays_in_the_rows_and_the_others_go_on(checkpoint: Path, tmp_path: Path) -> None:
    check = make_check(checkpoint, tmp_path)
    broken = Setting("select-0", dataclasses.replace(BASE, select_blocks=0))
    check.run([broken, Setting("base", BASE)])
    rows = rows_of(tmp_path / "replay_check.csv")
    assert [row["result"] for row in rows] == ["failed", "pass"]
    assert "select_blocks=0" in rows[0]["error"]
    assert "failed: " in (tmp_path / "replay_check.md").read_text()


def test_captures_are_made_once_and_those_of_other_tokens_refused(ordinary: ReplayCheck) -> None:
    setting = Setting("k-6", BASE.with_topk(6))
    meta = ordinary.directory / "traces" / setting.label / "meta.json"
    before = meta.stat().st_mtime_ns
    ordinary.capture(setting)
    assert meta.stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match="is a capture of something else"):
        dataclasses.replace(ordinary, steps=STEPS - 1).capture(setting)


def test_figures_count_as_sets_do_and_the_bounds_bind(ordinary: ReplayCheck) -> None:
    base, other = (ordinary.capture(s) for s in (Setting("base", BASE), Setting("k-6", BASE.with_topk(6))))
    first, second = (replay(t).selections for t in (base, other))
    sets = [
        [set(r.block_ids[a:b].tolist()) for a, b in zip(r.offsets, r.offsets[1:], strict=False)]
        for r in (first, second)
    ]
    assert same_blocks(first, second).tolist() == [len(a & b) for a, b in zip(*sets, strict=True)]
    warm = ~first.cold
    gamma = np.where(warm, first.gamma - 0.0101, np.nan)
    assert not compare(dataclasses.replace(first, gamma=gamma), first)["gamma_holds"]
    assert compare(dataclasses.replace(first, gamma=gamma + 0.0002), first)["gamma_holds"]
    for factor, holds in ((1.06, False), (1.04, True), (0.96, True), (0.94, False)):
        found = compare(dataclasses.replace(first, n_misses=first.n_misses * factor), first)
        assert found["misses_hold"] is holds
        assert found["misses_diff_relative"] == pytest.approx(factor - 1)
    with pytest.raises(TraceError, match="not of the same steps"):
        compare(first.take(warm), first)


def test_the_standard_error_is_that_of_batches_of_steps(ordinary: ReplayCheck) -> None:
    rows = replay(ordinary.capture(Setting("base", BASE))).selections
    warm = ~rows.cold
    order = rows.step - rows.step[warm].min()
    per_batch = np.array([3.0, -1.0, 4.0, 1.0, -5.0, 9.0, 2.0, 6.0])
    n_steps = STEPS - 1
    difference = per_batch[np.clip(order * 8 // n_steps, 0, 7)]
    assert standard_error(rows, difference) == pytest.approx(np.std(per_batch, ddof=1) / 8**0.5)


def test_the_command_line_writes_rows_and_says_whether_all_passed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_check, "SPARSE", BASE)
    monkeypatch.setattr(replay_check, "settings_around", lambda base: [Setting("base", base, "infllmv2")])
    document = tmp_path / "squares.txt"
    document.write_text(TEXT)
    arguments = [
        "--model",
        str(checkpoint),
        "--document",
        str(document),
        "--prompt-tokens",
        str(PROMPT),
        "--steps",
        "9",
    ]
    assert main(["--out", str(tmp_path / "out"), *arguments]) == 1, "InfLLMv2 from NOSA's queries is no exact replay"
    rows = rows_of(tmp_path / "out" / "replay_check.csv")
    assert [(r["base"], r["result"]) for r in rows][1] == ("infllmv2-base-slots-1.00", "pass")
    assert "squares.txt" in (tmp_path / "out" / "replay_check.md").read_text()
    assert main(["--out", str(tmp_path / "out"), "--model", "nothing-here"]) == 2


def test_only_that_names_no_setting_passes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "replay_check.csv").write_text("rows of before")
    assert main(["--out", str(tmp_path), "--only", "typo-*"]) == 2
    assert "names no setting; known: nosa-base-slots-1.00" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["replay_check.csv"]
