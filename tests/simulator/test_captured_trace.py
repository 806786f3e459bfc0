"""Bytes that the simulator charges equal the bytes that a real engine recorded, to the byte, for any captured trace."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow.compute as pc
import pytest

from nosa_sys import Engine, ModelShape, SparseConfig, Trace, simulate
from nosa_sys.engine.recorder import Recorder
from nosa_sys.models.random import random_model
from nosa_sys.simulator.hardware import load_hardware

SHAPE = ModelShape("random", 2, 4, 2, 16, 32, 48, 97, dtype="float32")
SPARSE = SparseConfig(block_size=16, topk=6, init_blocks=1, window_size=32, select_blocks=1)


@pytest.mark.parametrize(
    ("method", "slots", "policy"),
    [("nosa", 6, "exact"), ("nosa", 8, "lru"), ("nosa", 8, "beta"), ("infllmv2", 6, "exact"), ("full", None, None)],
)
def test_bytes_charged_equal_bytes_that_an_engine_recorded(tmp_path, method, slots, policy):
    sparse = dataclasses.replace(SPARSE, select_blocks=3 if method == "infllmv2" else 1)
    model = random_model(SHAPE, seed=3, dtype="float32")
    given = {} if slots is None else {"slots": slots, "policy": policy}
    rng = np.random.default_rng(1)
    with Recorder(tmp_path / "trace") as recorder:
        engine = Engine(model, sparse, method=method, recorder=recorder, **given)
        for length, new in ((150, 20), (1, 3), (208, 5)):  # of unequal lengths, leaving at different steps
            engine.add(rng.integers(0, 97, length).tolist(), max_new_tokens=new)
        for _ in range(4):
            engine.step()
        engine.add(rng.integers(0, 97, 170).tolist(), max_new_tokens=6)  # joins later
        list(engine.stream())
    trace = Trace.open(tmp_path / "trace")
    recorded = pc.sum(trace.table("selections")["h2d_bytes"]).as_py()
    steps = trace.table("steps")
    whole = steps.filter(pc.equal(steps["layer"], -1))
    for engine_name in ("recurrence", "simpy"):
        prediction = simulate(trace, hardware="h200-provisional", engine=engine_name)
        assert prediction.h2d_bytes_total == recorded == pc.sum(whole["h2d_bytes"]).as_py()
        assert prediction.d2h_bytes_total == pc.sum(whole["d2h_bytes"]).as_py()
    assert (recorded > 0) == (method != "full")
    assert prediction.n_cold_steps >= 2
    assert prediction.n_steps == trace.meta.n_steps == 20
    assert prediction.settings["slots"] == trace.meta.slots


def test_only_what_was_recorded_keeps_the_status_of_a_validated_profile(tmp_path):
    model = random_model(SHAPE, seed=3, dtype="float32")
    with Recorder(tmp_path / "trace") as recorder:
        engine = Engine(model, SPARSE, recorder=recorder)
        engine.add(np.random.default_rng(1).integers(0, 97, 150).tolist(), max_new_tokens=5)
        list(engine.stream())
    trace = Trace.open(tmp_path / "trace")
    validated = dataclasses.replace(load_hardware("h200-provisional"), status="validated")
    # a CPU's eager engine calls its order serial, and moves K and V in one operation
    assert trace.meta.schedule == "serial"
    own = {"hardware": validated, "schedule": "fused_kv"}
    assert simulate(trace, **own).status == "validated"
    assert simulate(trace, **own, slots=6, policy="exact").status == "validated"
    for change in ({"slots": 8}, {"slots": 8, "policy": "belady"}, {"schedule": "serial"}):
        assert simulate(trace, **(own | change)).status == "projected"
    predicted = Trace(trace.directory, dataclasses.replace(trace.meta, status="projected"))
    assert simulate(predicted, **own).status == "projected"
    on_gpu = Trace(trace.directory, dataclasses.replace(trace.meta, device="NVIDIA H200"))
    assert simulate(on_gpu, hardware=validated, schedule="serial").status == "validated"
    assert simulate(on_gpu, **own).status == "projected"


def test_key_means_in_the_models_type_count_in_memory_and_are_never_validated(tmp_path):
    """Time is priced as for float32 means, which no run of this trace read: said, and a projection."""
    shape = dataclasses.replace(SHAPE, dtype="bfloat16")
    own = {"hardware": dataclasses.replace(load_hardware("h200-provisional"), status="validated")}
    found = {}
    for means in ("float32", "model"):
        with Recorder(tmp_path / means) as recorder:
            engine = Engine(
                random_model(shape, seed=3, dtype="bfloat16"), SPARSE, recorder=recorder, key_means_dtype=means
            )
            engine.add(list(range(90)), max_new_tokens=5)
            engine.run()
        trace = Trace.open(tmp_path / means)
        windows = SPARSE.n_windows(94)
        stored = sum(layer[:1, :, :windows].numel() * layer.element_size() for layer in engine.memory.context.key_means)
        for change in ({}, {"slots": 8}, {"context": 94, "steps": 1}):  # recorded, replayed, drawn
            assert simulate(trace, **own, extrapolate=True, **change).memory["key_mean_bytes"] == stored, change
        found[means] = simulate(trace, **own, schedule="fused_kv")
    assert (found["float32"].status, found["model"].status) == ("validated", "projected")
    assert any("key means of bfloat16" in rule for rule in found["model"].rules)
    assert not any("key means of" in rule for rule in found["float32"].rules)
    assert found["float32"].step_time_us == found["model"].step_time_us
