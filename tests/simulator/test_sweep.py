"""Sweeps: recipes refused by name, rows in order, the same bytes whatever the workers, resumable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nosa_sys.errors import ConfigError, HardwareError, NosaError, TraceError
from nosa_sys.simulator import sweep as sweep_module
from nosa_sys.simulator.recipe import load_recipe, parse_recipe, slots_of
from nosa_sys.simulator.simulate import simulate
from nosa_sys.simulator.sweep import sweep
from tests.simulator.sweep_recipes import RECIPE, changed, rows_of


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ({"axes__topkk": [8]}, ("axes.topkk", "'topk'")),
        ({"hardwear": "ideal"}, ("hardwear", "'hardware'")),
        ({"base__synthetic__sparse__blocksize": 64}, ("base.synthetic.sparse.blocksize", "'block_size'")),
        ({"axes__h2d_gbps": [float("nan")]}, ("h2d_gbps",)),
        ({"axes__h2d_gbps": [-5.0]}, ("h2d_gbps",)),
        ({"axes__h2d_gbps": [float("inf")]}, ("h2d_gbps",)),
        ({"axes__h2d_gbps": []}, ("h2d_gbps", "at least one")),
        ({"axes__batch": [0]}, ("batch",)),
        ({"axes__batch": ["many"]}, ("batch",)),
        ({"axes__batch": [True]}, ("batch",)),
        ({"axes__block_size": [0]}, ("block_size",)),
        ({"axes__slots": ["half"]}, ("slots",)),
        ({"axes__slots": [0.5]}, ("slots",)),
        ({"axes__k_e": [12], "axes__select_blocks": [4]}, ("k_e", "select_blocks")),
        ({"base__trace": "somewhere"}, ("exactly one",)),
        ({"base": {}}, ("exactly one",)),
        ({"hardware": None}, ("hardware",)),
        ({"axes__hardware": ["ideal"]}, ("hardware",)),
        ({"h2d_gbps": 25.0}, ("h2d_gbps",)),
        ({"name": "../up"}, ("name",)),
        ({"schedule": "magic"}, ("magic", "serial, fused_kv, split_merge, two_batch, prefetch")),
        ({"prefetch_blocks": 2}, ("prefetch_blocks", "schedule prefetch")),
        ({"axes__batch": list(range(1, 1001)), "axes__context": list(range(1, 1001))}, ("configurations",)),
        ({"link": "pcie4-x16", "axes__link": ["own"]}, ("link", "not both")),
        ({"host_kv_dtype": "fp8", "axes__host_kv_dtype": ["int4"]}, ("host_kv_dtype", "not both")),
        ({"dequant_gbps": 100.0}, ("host_kv_dtype",)),
        ({"axes": {}}, ("at least one axis",)),
        ({"sobol": {"points": 0}}, ("sobol.points",)),
        ({"sobol": {"points": 4, "batch": {"low": 4, "high": 2}}}, ("sobol.batch", "low=4")),
        ({"sobol": {"points": 4, "batch": {"low": 1, "hihg": 2}}}, ("sobol.batch.hihg", "'high'")),
        ({"sobol": {"points": 4, "batch": {"low": 1, "high": 2}}}, ("batch", "axis and a range")),
    ],
)
def test_bad_recipes_name_the_key_in_one_line(edits, words):
    with pytest.raises(ConfigError) as caught:
        parse_recipe(changed(**edits))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_broken_files_are_named(tmp_path):
    path = tmp_path / "recipe.yaml"
    for text in ("axes: [1, 2", "- 1\n- 2\n", "", "!!python/object/apply:os.system [ls]", "a: " + "[" * 1500):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"recipe\.yaml"):
            load_recipe(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"recipe\.yaml"):
        load_recipe(path)
    path.write_text("#" * (2**20 + 1))
    with pytest.raises(ConfigError, match="limit"):
        load_recipe(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_recipe(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("edits", "error"),
    [
        ({"hardware": "h900"}, HardwareError),
        ({"base__synthetic__model_shape": "gpt-9"}, ConfigError),
        ({"axes__method": ["nosa", "magic"]}, ConfigError),
        ({"axes__policy": ["fifo"]}, ConfigError),
        ({"hardware": "ideal", "axes__h2d_gbps": None}, HardwareError),
        ({"base__synthetic": None, "base__trace": "/nowhere/at/all"}, TraceError),
    ],
)
def test_recipes_that_nothing_survives_are_refused_and_leave_nothing(tmp_path, edits, error):
    with pytest.raises(error):
        sweep(parse_recipe(changed(**edits)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("edits", [{"axes__slots": [1, 2]}, {"axes__k_e": [1000], "axes__topk": [16]}])
@pytest.mark.parametrize("before", [(), ("notes.txt",)])
def test_a_sweep_of_refused_rows_alone_is_an_error_and_leaves_nothing(tmp_path, edits, before):
    out = tmp_path / "out"
    for name in before:
        out.mkdir()
        (out / name).write_text("mine")
    with pytest.raises(ConfigError, match=r"none of the .* configurations can be run; the first: "):
        sweep(parse_recipe(changed(**edits)), out, workers=1)
    assert tuple(p.name for p in tmp_path.rglob("*.*")) == before
    assert out.exists() == bool(before)


def test_rows_come_in_order_and_bad_combinations_say_why(tmp_path):
    progress = []
    result = sweep(parse_recipe(RECIPE), tmp_path, workers=1, progress=lambda *a: progress.append(a))
    rows = rows_of(tmp_path)
    assert [r["index"] for r in rows] == list(range(24))
    asked = [(r["topk"], r["slots_asked"], r["batch"], r["h2d_gbps"]) for r in rows]
    wanted = [(k, s, b, g) for k in (16, 24) for s in ("1.0", "1.5x", "12") for b in (1, 3) for g in (25.0, 50.0)]
    assert asked == wanted
    refused = [r for r in rows if r["refused"]]
    assert {r["slots_asked"] for r in refused} == {"12"}
    assert all("fewer than topk" in r["refused"] and r["step_time_us"] is None for r in refused)
    assert {(r["topk"], r["slots"], r["select_blocks"], r["window_size"]) for r in rows if not r["refused"]} == {
        (16, 16, 4, 256), (16, 24, 4, 256), (24, 24, 6, 384), (24, 36, 6, 384),
    }  # fmt: skip
    assert result.summary["n_refused"] == 8
    assert result.summary["n_configurations"] == 24
    assert json.loads((tmp_path / "summary.json").read_text()) == result.summary
    assert progress[-1][:2] == (24, 24)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["results.parquet", "summary.json"]


def test_a_row_equals_simulate(tmp_path):
    sweep(parse_recipe(RECIPE), tmp_path, workers=1)
    row = rows_of(tmp_path)[15]
    from nosa_sys.simulator.sweep_plan import base_workload

    recipe = parse_recipe(RECIPE)
    base = base_workload(recipe)
    prediction = simulate(
        base, hardware="h200-provisional", h2d_gbps=row["h2d_gbps"], batch=row["batch"],
        sparse=base.sparse.with_topk(row["topk"]), slots=row["slots"],
    )  # fmt: skip
    for key in ("step_time_us", "step_time_p90_us", "tokens_per_s", "h2d_bytes_total"):
        assert row[key] == pytest.approx(getattr(prediction, key), rel=1e-12)
    assert (row["limited_by"], row["status"]) == (prediction.limited_by, prediction.status)
    assert (row["policy"], row["slots"]) == (prediction.settings["policy"], prediction.settings["slots"])


@pytest.mark.parametrize("schedule", ["fused_kv", "split_merge", "two_batch", "prefetch"])
def test_a_recipe_takes_every_schedule(tmp_path, schedule):
    """Rows equal simulate; a schedule that guesses refuses the rows without a spare slot."""
    more = {"prefetch_blocks": 3, "prefetch_hit_share": 0.25} if schedule == "prefetch" else {}
    recipe = parse_recipe(changed(schedule=schedule, axes={"slots": [16, 20], "batch": [3]}, **more))
    sweep(recipe, tmp_path, workers=1)
    none_spare, spare = rows_of(tmp_path)
    from nosa_sys.simulator.sweep_plan import base_workload

    if schedule == "prefetch":
        assert "slots >= topk + 3 = 19" in none_spare["refused"]
    else:
        assert none_spare["refused"] == ""
    expected = simulate(
        base_workload(recipe), hardware="h200-provisional", schedule=schedule, batch=3, slots=20, **more
    )
    assert spare["schedule"] == schedule
    for key in ("step_time_us", "h2d_bytes_total", "prefetch_bytes_total", "wasted_prefetch_bytes_total"):
        assert spare[key] == pytest.approx(getattr(expected, key), rel=1e-12)


def test_block_size_keeps_token_budgets_and_k_e_sets_the_share(tmp_path):
    data = changed(axes={"block_size": [32, 64, 48], "k_e": [8, 12, 16], "h2d_gbps": [25.0]})
    sweep(parse_recipe(data), tmp_path, workers=1)
    for row in rows_of(tmp_path):
        if row["refused"]:
            assert (row["block_size"], row["k_e"]) in {(48, 8), (48, 12), (48, 16), (32, 8), (32, 12), (64, 16)}, row
            continue
        assert row["topk"] * row["block_size"] == 1024
        assert row["window_size"] == 256
        assert row["select_blocks"] == row["topk"] - row["k_e"]


def test_a_killed_sweep_resumes_and_gives_the_same_bytes(tmp_path, monkeypatch):
    recipe = parse_recipe(RECIPE)
    sweep(recipe, tmp_path / "whole", workers=1)
    ran = []
    original = sweep_module.run_group

    def dies_at_the_second(recipe, group, source=None):
        ran.append(group.number)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return original(recipe, group, source)

    monkeypatch.setattr(sweep_module, "run_group", dies_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        sweep(recipe, tmp_path / "killed", workers=1)
    assert not (tmp_path / "killed" / "results.parquet").exists()
    sweep(recipe, tmp_path / "killed", workers=1)
    assert len(ran) == len(set(ran)) + 1  # only the group that was interrupted ran twice
    for name in ("results.parquet", "summary.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_another_recipe_does_not_resume_from_the_first(tmp_path, monkeypatch):
    def dies(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_module, "write_results", dies)
    with pytest.raises(KeyboardInterrupt):
        sweep(parse_recipe(RECIPE), tmp_path / "out", workers=1)
    monkeypatch.undo()
    other = parse_recipe(changed(seed=1))
    sweep(other, tmp_path / "out", workers=1)
    sweep(other, tmp_path / "alone", workers=1)
    assert (tmp_path / "out/results.parquet").read_bytes() == (tmp_path / "alone/results.parquet").read_bytes()


def test_sweep_over_a_trace(tmp_path, write_trace):
    _, total = write_trace(tmp_path / "trace", steps=20)
    data = {
        "name": "traced",
        "base": {"trace": str(tmp_path / "trace")},
        "hardware": "ideal",
        "axes": {"slots": [6, 9], "select_blocks": [1, 2], "h2d_gbps": [10.0, 20.0]},
    }
    sweep(parse_recipe(data), tmp_path / "out", workers=2)
    rows = rows_of(tmp_path / "out")
    assert [bool(r["refused"]) for r in rows] == [False, False, False, False, True, True, True, True]
    assert all("scores" in r["refused"] for r in rows[4:])
    assert rows[0]["h2d_bytes_total"] == rows[1]["h2d_bytes_total"] == total
    assert rows[0]["step_time_us"] == pytest.approx(2 * rows[1]["step_time_us"])
    assert rows[2]["h2d_bytes_total"] < total


def test_outputs_that_cannot_be_written_are_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NosaError, match="file"):
        sweep(parse_recipe(RECIPE), tmp_path / "file" / "out", workers=1)
    with pytest.raises(ConfigError, match="workers"):
        sweep(parse_recipe(RECIPE), tmp_path / "out", workers=0)


def test_shipped_recipes_parse():
    recipes = sorted(Path(sweep_module.nosa_sys.__file__).parent.joinpath("experiments").glob("sweep-*.yaml"))
    assert recipes
    for path in recipes:
        assert load_recipe(path).n_configurations > 1


def test_slots_as_count_or_multiple():
    assert [slots_of(v, 64) for v in (64, 80, 1.0, 1.25, "1.1x", "2k")] == [64, 80, 64, 80, 71, 128]
