"""simulate on hand-made misses and real trace files: exact arithmetic, bytes, cold steps, projections."""

from __future__ import annotations

import dataclasses
import gzip
import json

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nosa_sys import ModelShape, SparseConfig, Trace, simulate
from nosa_sys.errors import CapacityError, ConfigError, HardwareError, NosaError, TraceError
from nosa_sys.simulator.hardware import load_hardware
from nosa_sys.simulator.sources import SyntheticWorkload
from nosa_sys.traces.replay import replay
from nosa_sys.traces.timeline import StepMarks, write_timeline

IDEAL = {"hardware": "ideal", "h2d_gbps": 32.768}


def test_case_26_one_microsecond_a_missed_block(make_table, tiny_shape):
    """64 x 128 x 2 x 2 bytes at 32.768 GB/s are exactly 1 us."""
    misses = np.zeros((1, 4, 2, 2), dtype=int)
    misses[0, 1:, 0, 0], misses[0, 1:, 1, 1] = 5, 2
    for engine in ("recurrence", "simpy"):
        prediction = simulate(make_table(misses), model_shape=tiny_shape, engine=engine, **IDEAL)
        assert prediction.step_time_us == 7.0
        assert prediction.h2d_exposed_us == 7.0
        assert prediction.h2d_hidden_us == 0.0
        assert prediction.h2d_bytes_per_step == 7 * 32768
        assert prediction.limited_by == "h2d"
        assert prediction.link_utilisation == pytest.approx(1.0)
        assert prediction.status == "projected"


def test_case_26_throughput_is_per_sequence_and_aggregate_and_leaves_the_cold_step_out(make_table, tiny_shape):
    """Batch 4 at 3 ms a step: 1,333.3 tok/s together; at 10 ms: 100 tok/s a sequence, 400 together."""
    for blocks, per_sequence, aggregate in ((3000, 1000 / 3, 4000 / 3), (10_000, 100.0, 400.0)):
        misses = np.zeros((4, 11, 2, 2), dtype=int)
        misses[:, :, 0, 0] = blocks // 4
        misses[:, 0] = 99_999  # the cold step
        prediction = simulate(make_table(misses), model_shape=tiny_shape, **IDEAL)
        assert prediction.step_time_us == blocks
        assert prediction.tokens_per_s_per_sequence == pytest.approx(per_sequence)
        assert prediction.tokens_per_s == pytest.approx(aggregate)
        assert prediction.n_cold_steps == 1
        assert prediction.cold_step_time_us == 99_999 * 16
        assert prediction.h2d_bytes_total - prediction.h2d_bytes_total_warm == prediction.cold_h2d_bytes


@pytest.mark.parametrize("engine", ["recurrence", "simpy"])
def test_case_27_step_overhead_adds_exactly(make_table, tiny_shape, engine):
    ideal = load_hardware("ideal")
    misses = np.full((1, 3, 2, 2), 3)
    table = make_table(misses)
    plain = simulate(table, model_shape=tiny_shape, engine=engine, **IDEAL)
    slower = simulate(
        table, hardware=dataclasses.replace(ideal, host_per_step_us=50.0), h2d_gbps=32.768, model_shape=tiny_shape,
        engine=engine,
    )  # fmt: skip
    assert slower.step_time_us - plain.step_time_us == 50.0
    assert slower.host_overhead_us == 50.0


def test_full_duplex_write_back_is_free_or_hidden(make_table, tiny_shape):
    """Step 1 fills a block: on ideal hardware its write-back costs nothing, yet its bytes are counted."""
    misses = np.full((1, 3, 2, 2), 1)
    prediction = simulate(make_table(misses, start=126), model_shape=tiny_shape, **IDEAL)
    assert prediction.step_time_us == 4.0
    assert prediction.d2h_bytes_total == 4 * 32768
    assert prediction.d2h_bytes_per_step == 2 * 32768


@given(st.integers(0, 500), st.floats(0.5, 200.0))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_halving_misses_halves_transfer_time(make_table, tiny_shape, seed, gbps):
    misses = np.random.default_rng(seed).integers(0, 9, (2, 4, 2, 2))
    whole = simulate(make_table(misses * 2), model_shape=tiny_shape, hardware="ideal", h2d_gbps=gbps)
    half = simulate(make_table(misses), model_shape=tiny_shape, hardware="ideal", h2d_gbps=gbps)
    assert whole.h2d_exposed_us == pytest.approx(2 * half.h2d_exposed_us, rel=1e-12)
    assert whole.h2d_bytes_total == 2 * half.h2d_bytes_total


@pytest.mark.parametrize("hardware", ["ideal", "h200-provisional"])
def test_all_hits_do_not_depend_on_bandwidth(make_table, tiny_shape, hardware):
    table = make_table(np.zeros((2, 70, 2, 2), dtype=int))
    found = [simulate(table, model_shape=tiny_shape, hardware=hardware, h2d_gbps=x) for x in (0.001, 25.0, 1e6)]
    assert len({p.step_time_us for p in found}) == 1
    assert found[0].h2d_exposed_us == 0.0
    if hardware == "ideal":
        assert found[0].tokens_per_s is None
        assert found[0].limited_by == "nothing"


@pytest.mark.parametrize("gbps", [0, -1.0, float("nan"), float("inf"), True, "25"])
def test_bad_bandwidth_is_refused(make_table, tiny_shape, gbps):
    with pytest.raises(HardwareError, match="h2d_gbps"):
        simulate(make_table(np.ones((1, 2, 2, 2))), model_shape=tiny_shape, hardware="ideal", h2d_gbps=gbps)


def test_ideal_hardware_needs_a_bandwidth(make_table, tiny_shape):
    with pytest.raises(HardwareError, match="h2d_gbps"):
        simulate(make_table(np.ones((1, 2, 2, 2))), model_shape=tiny_shape, hardware="ideal")


def test_bytes_charged_equal_bytes_recorded(tmp_path, write_trace):
    _, total = write_trace(tmp_path / "trace", steps=40)
    trace = Trace.open(tmp_path / "trace")
    for engine in ("recurrence", "simpy"):
        prediction = simulate(trace, hardware="h200-provisional", engine=engine)
        assert prediction.h2d_bytes_total == total == pc.sum(trace.table("selections")["h2d_bytes"]).as_py()
    steps = trace.table("steps")
    whole = steps.filter(pc.equal(steps["layer"], -1))
    assert prediction.d2h_bytes_total == pc.sum(whole["d2h_bytes"]).as_py() > 0
    assert prediction.settings["context_tokens"] == 239
    assert simulate(str(tmp_path / "trace"), hardware="h200-provisional") == simulate(
        trace, hardware="h200-provisional"
    )


def test_both_engines_agree_on_a_trace(tmp_path, write_trace):
    write_trace(tmp_path / "trace", steps=40)
    found = [
        simulate(tmp_path / "trace", hardware="h200-provisional", batch=5, engine=e).to_dict()
        for e in ("recurrence", "simpy")
    ]
    for key, value in found[0].items():
        if isinstance(value, float):
            assert value == pytest.approx(found[1][key], rel=1e-9, abs=1e-9), key
        else:
            assert value == found[1][key], key


def test_replay_under_other_slots_uses_the_replayed_misses(tmp_path, write_trace):
    meta, _ = write_trace(tmp_path / "trace", steps=30)
    trace = Trace.open(tmp_path / "trace")
    prediction = simulate(trace, slots=9, policy="lru", **IDEAL)
    assert (
        prediction.h2d_bytes_total == int(replay(trace, slots=9, policy="lru").misses.n_misses.sum()) * meta.block_bytes
    )
    assert prediction.settings["slots"] == 9
    assert prediction.h2d_bytes_total < simulate(trace, **IDEAL).h2d_bytes_total
    with pytest.raises(CapacityError, match="slots=5"):
        simulate(trace, slots=5, **IDEAL)
    with pytest.raises(TraceError, match="scores"):
        simulate(trace, sparse=dataclasses.replace(meta.sparse, select_blocks=2), **IDEAL)


def test_another_batch_is_drawn_and_labelled(tmp_path, write_trace):
    _, total = write_trace(tmp_path / "trace", steps=30)
    trace = Trace.open(tmp_path / "trace")
    own = simulate(trace, **IDEAL)
    same = simulate(trace, batch=2, steps=30, **IDEAL)
    assert same.step_time_us == own.step_time_us
    six = simulate(trace, batch=6, **IDEAL)
    assert six.status == "projected"
    assert any("offsets" in rule for rule in six.rules)
    # every copy plays all 29 warm rows once, whatever its offset, and the same cold row
    assert six.h2d_bytes_total == 3 * total
    assert six == simulate(trace, batch=6, **IDEAL)
    assert six != simulate(trace, batch=6, seed=1, **IDEAL)


def test_layers_map_by_relative_depth_and_heads_cyclically(make_table, tiny_shape):
    misses = np.zeros((1, 3, 2, 2), dtype=int)
    misses[0, :, 0], misses[0, :, 1] = (1, 10), (100, 1000)
    table = make_table(misses)
    from nosa_sys.simulator.sources import Request, TableSource

    source = TableSource(
        table, tiny_shape, SparseConfig(), slots=64, policy="exact", device_block_bytes=table.block_bytes
    )
    wide = dataclasses.replace(tiny_shape, name="wide", n_layers=5, n_kv_heads=3, n_q_heads=6)
    loads = source.workload(Request(model_shape=wide)).loads
    # depth centres .1 .3 .5 .7 .9 of two layers: 0 0 1 1 1; heads 0 1 0
    assert loads.misses.tolist() == [[12, 12, 1200, 1200, 1200]] * 3


def test_longer_context_needs_the_locality_model_and_says_so(tmp_path, write_trace):
    write_trace(tmp_path / "trace", steps=8)
    prediction = simulate(tmp_path / "trace", hardware="h200-provisional", context=2000)
    assert prediction.status == "projected"
    assert any("locality model at 2000 tokens" in rule for rule in prediction.rules)
    assert any("its misses are not" in rule for rule in prediction.rules)


def test_case_28_given_bandwidth_wins_over_the_profile(make_table, tiny_shape):
    table = make_table(np.full((1, 3, 2, 2), 4))
    profile = dataclasses.replace(load_hardware("ideal"), h2d_gbps=25.0)
    from_profile = simulate(table, model_shape=tiny_shape, hardware=profile)
    given_too = simulate(table, model_shape=tiny_shape, hardware=profile, h2d_gbps=50.0)
    assert from_profile.settings["h2d_gbps"] == 25.0
    assert given_too.settings["h2d_gbps"] == 50.0
    assert from_profile.step_time_us == 2 * given_too.step_time_us == pytest.approx(16 * 32768 / 25e3)


def test_status_is_that_of_the_profile_only_for_a_situation_that_was_recorded(make_table, tiny_shape):
    table = make_table(np.full((1, 3, 2, 2), 4))
    validated = dataclasses.replace(load_hardware("h200-provisional"), status="validated")
    assert simulate(table, model_shape=tiny_shape, hardware=validated).status == "validated"
    assert simulate(table, model_shape=tiny_shape, hardware=validated, batch=2).status == "projected"
    assert simulate(table, model_shape=tiny_shape, hardware=validated, h2d_gbps=25.0).status == "projected"


def test_synthetic_requests_too_large_are_refused_at_once(tiny_shape):
    for change in ({"steps": 2**31}, {"batch": 10**9}, {"context": 2**40}):
        for method in ("nosa", "full"):
            if "context" in change and method == "full":
                continue
            work = SyntheticWorkload(tiny_shape, SparseConfig(), **{"context": 4096, "method": method, **change})
            with pytest.raises(CapacityError, match=next(iter(change))):
                simulate(work, **IDEAL)


def test_device_memory_is_counted_and_its_limit_named(tiny_shape):
    """16 sequences x 2 layers x 2 heads: 64 slots of 32 KiB, 127 windows of fp32 means, betas of slots and windows."""
    work = SyntheticWorkload(tiny_shape, SparseConfig(), context=2048, batch=16, steps=1, slots=64)
    small = dataclasses.replace(load_hardware("h200-provisional"), gpu_memory_bytes=70e6)
    prediction = simulate(work, hardware=small)
    heads = 16 * 2 * 2
    assert prediction.memory["slot_bytes"] == heads * 64 * 32768
    assert prediction.memory["key_mean_bytes"] == heads * 127 * 128 * 4
    assert prediction.memory["beta_bytes"] == heads * (127 + 64 * 64) * 4
    assert prediction.memory["host_pool_bytes"] == heads * 32 * 32768
    assert len(prediction.limits) == 1
    assert "exceeds device memory" in prediction.limits[0]
    assert "a batch of 7 fits" in prediction.limits[0]
    fits = simulate(dataclasses.replace(work, batch=7), hardware=small)
    assert fits.limits == []
    assert simulate(dataclasses.replace(work, batch=8), hardware=small).limits


def test_dense_attention_moves_nothing_and_keeps_everything(tiny_shape):
    work = SyntheticWorkload(tiny_shape, SparseConfig(), context=2048, batch=2, steps=3, method="full")
    prediction = simulate(work, hardware="h200-provisional")
    assert prediction.h2d_bytes_total == prediction.d2h_bytes_total == 0
    assert prediction.select_us == 0.0
    assert prediction.memory["slot_bytes"] == 2 * 2 * 2 * 33 * 32768
    assert prediction.memory["host_pool_bytes"] == 0


def test_only_cold_steps_are_averaged_when_there_is_nothing_else(make_table, tiny_shape):
    prediction = simulate(make_table(np.ones((1, 1, 2, 2))), model_shape=tiny_shape, **IDEAL)
    assert prediction.averaged_steps == "cold"
    assert any("cold" in rule for rule in prediction.rules)
    with pytest.raises(ConfigError, match="at least 2 tokens"):
        simulate(make_table(np.ones((1, 1, 2, 2))), model_shape=tiny_shape, steps=3, **IDEAL)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"batch": 0}, "batch"),
        ({"steps": -1}, "steps"),
        ({"seed": -1}, "seed"),
        ({"engine": "magic"}, "engine"),
        ({"schedule": "prefetch"}, "schedule"),
        ({"policy": "fifo"}, "policy"),
        ({"method": "dma"}, "method"),
        ({"context": 7}, "context"),
        ({"model_shape": None}, "model_shape"),
        ({"model_shape": "llama-9"}, "llama-9"),
        ({"model_shape": "nosa-8b"}, "layers"),
        ({"sparse": SparseConfig(block_size=32)}, "block_size"),
        ({"steps": 2**31}, "steps"),
        ({"batch": 10**9}, "batch"),
        ({"hardware": "b300"}, "b300"),
    ],
)
def test_bad_requests_name_the_value(make_table, tiny_shape, change, name):
    table = make_table(np.ones((1, 3, 2, 2)))
    with pytest.raises(NosaError, match=name):
        simulate(table, **{"model_shape": tiny_shape, **IDEAL, **change})


def test_missing_trace_and_rows(tmp_path, make_table, tiny_shape):
    with pytest.raises(TraceError, match="nowhere"):
        simulate(tmp_path / "nowhere", **IDEAL)
    table = make_table(np.ones((1, 3, 2, 2)))
    short = dataclasses.replace(table, **{f.name: getattr(table, f.name)[:-1] for f in dataclasses.fields(table)[:8]})
    with pytest.raises(TraceError, match="sequence 0"):
        simulate(short, model_shape=tiny_shape, batch=2, **IDEAL)


def test_timeline_carries_every_copy(tmp_path, write_trace):
    _, total = write_trace(tmp_path / "trace", steps=40)
    path = tmp_path / "timeline.json.gz"
    prediction = simulate(tmp_path / "trace", hardware="h200-provisional", timeline=path)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    begins = [e for e in events if e.get("ph") == "b"]
    assert sum(e["args"]["bytes"] for e in begins if e["cat"] == "h2d") == total
    assert sum(e["args"]["bytes"] for e in begins if e["cat"] == "d2h") == prediction.d2h_bytes_total
    assert prediction == simulate(tmp_path / "trace", hardware="h200-provisional")


def test_the_simulated_run_stands_beside_the_traces_own_under_the_same_tracks(tmp_path, write_trace):
    write_trace(tmp_path / "trace", steps=12)
    path = tmp_path / "both.json.gz"
    given = {"hardware": "h200-provisional", "timeline": path, "with_measured": True}
    with pytest.raises(TraceError, match="holds no times"):
        simulate(tmp_path / "trace", **given)
    assert not path.exists()
    marks = [("gpu", "select", 0, 0.0, 2.0, 0), ("h2d", "copy", 0, 2.0, 9.0, 64), ("d2h", "write-back", 0, 2.0, 3.0, 8)]
    write_timeline(tmp_path / "trace" / "timeline.json.gz", [StepMarks(2, 700.0, marks), StepMarks(3, 900.0, marks)])
    plain = simulate(tmp_path / "trace", hardware="h200-provisional")
    assert simulate(tmp_path / "trace", **given) == plain
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["simulated", "measured (clock marks)"]
    begins = [e for e in events if e["ph"] == "b"]
    tracks = [{e["cat"] for e in begins if e["pid"] == pid} for pid in (1, 2)]
    assert tracks[1] <= tracks[0] == {"gpu", "h2d", "d2h", "host"}
    # the first step that both have begins at the same place; the host's time before it is the simulation's own
    first = [min(e["ts"] for e in begins if e["pid"] == pid and e["args"]["step"] == 2) for pid in (1, 2)]
    assert first[0] == pytest.approx(first[1])
    assert min(e["ts"] for e in begins) >= 0.0
    with pytest.raises(ConfigError, match="with_measured"):
        simulate(tmp_path / "trace", hardware="h200-provisional", with_measured=True)


def test_prediction_is_strict_json_with_the_promised_keys():
    work = SyntheticWorkload(ModelShape.preset("nosa-1b"), SparseConfig(), context=5000, steps=3)
    data = json.loads(json.dumps(simulate(work, hardware="h200-provisional").to_dict(), allow_nan=False))
    promised = (
        "step_time_us", "tokens_per_s", "tokens_per_s_per_sequence", "h2d_bytes_per_step", "h2d_exposed_us",
        "h2d_hidden_us", "link_utilisation", "limited_by", "status",
    )  # fmt: skip
    assert set(promised) <= set(data)
    parts = ("select_us", "h2d_exposed_us", "attention_us", "gemm_us", "host_overhead_us", "d2h_exposed_us")
    assert sum(data[p] for p in parts) == pytest.approx(data["step_time_us"], rel=1e-9)
