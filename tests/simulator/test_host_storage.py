"""Host blocks in another format: bytes, capacity and conversion by hand, whatever the schedule."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nosa_sys import ModelShape, SparseConfig, simulate
from nosa_sys.errors import ConfigError
from nosa_sys.simulator.hardware import load_hardware
from nosa_sys.simulator.host_storage import host_storage
from nosa_sys.simulator.schedules import SCHEDULES, get_schedule
from nosa_sys.simulator.simulate import price
from nosa_sys.simulator.sources import Request, SyntheticSource, SyntheticWorkload

BF16_BYTES, INT4_BYTES = 32768, 8704  # a block of 64 tokens, D 128: int4 has two fp16 scales a token and side


def misses_of(steps: int = 3) -> np.ndarray:
    """[sequence, step, layer, head]: one miss a head, two in layer 1."""
    misses = np.ones((2, steps, 2, 2), dtype=np.int64)
    misses[:, :, 1] = 2
    return misses


def test_bytes_time_and_capacity_of_int4_by_hand(make_table, tiny_shape) -> None:
    """Layer 0 misses 4 blocks, layer 1 misses 8; at 8.704 GB/s an int4 block takes 1 us to fetch.

    Converting reads and writes 41,472 bytes a block: at 41.472 GB/s 1 us, and 5 us a layer for the launch.
    """
    ideal = dataclasses.replace(load_hardware("ideal"), h2d_gbps=8.704)
    given = {"model_shape": tiny_shape, "schedule": "fused_kv"}
    found = simulate(
        make_table(misses_of()),
        hardware=ideal,
        host_kv_dtype="int4",
        dequant_gbps=41.472,
        dequant_fixed_us=5.0,
        **given,
    )
    plain = simulate(make_table(misses_of()), hardware=ideal, **given)
    assert found.h2d_bytes_per_step == 12 * INT4_BYTES
    assert found.h2d_exposed_us == pytest.approx(12.0)
    assert found.attention_us == pytest.approx(12.0 + 2 * 5.0)
    assert found.conversion_us == pytest.approx(22.0)
    assert found.step_time_us == pytest.approx(34.0)
    assert found.misses_per_head_step == plain.misses_per_head_step
    assert found.memory["host_pool_bytes"] * BF16_BYTES == plain.memory["host_pool_bytes"] * INT4_BYTES
    assert found.memory["gpu_bytes"] == plain.memory["gpu_bytes"]
    assert plain.conversion_us == 0.0
    assert found.settings["host_kv_dtype"] == "int4:64:float16"
    rule = next(line for line in found.rules if "assumed" in line and "int4" in line)
    for number in ("8704 bytes", "32768", "41.47 GB/s (given)", "5 us a layer (given)"):
        assert number in rule


def test_blocks_are_written_back_in_the_hosts_format(make_table, tiny_shape) -> None:
    """Position 127 fills a block: 2 layers x 2 sequences x 2 heads of 8,704 bytes, converted in select_us."""
    table = make_table(np.zeros((2, 3, 2, 2), dtype=np.int64), start=126)
    ideal = dataclasses.replace(load_hardware("ideal"), h2d_gbps=1.0)
    found = simulate(
        table, hardware=ideal, model_shape=tiny_shape, host_kv_dtype="int4", dequant_gbps=41.472, dequant_fixed_us=3.0
    )
    assert found.d2h_bytes_total == 8 * INT4_BYTES
    assert found.select_us == pytest.approx((2 * 3.0 + 8 * 1.0) / 2)  # one of the two warm steps


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_every_schedule_converts_and_both_machines_agree(schedule: str, name: str) -> None:
    work = SyntheticWorkload(
        ModelShape("s", 3, 8, 2, 128, 256, 512, 1000), SparseConfig(), context=6000, batch=3, steps=6, slots=72
    )
    given = {"hardware": "h200", "schedule": schedule, "extrapolate": True}
    fast = simulate(work, host_kv_dtype=name, **given)
    slow = simulate(work, host_kv_dtype=name, engine="simpy", **given)
    plain = simulate(work, **given)
    assert fast.step_time_us == pytest.approx(slow.step_time_us, rel=1e-9)
    assert fast.conversion_us > 0.0
    assert fast.h2d_bytes_total * BF16_BYTES == plain.h2d_bytes_total * {"fp8": 16384, "int4": INT4_BYTES}[name]
    assert fast.status == "projected"
    free = simulate(work, host_kv_dtype=name, dequant_gbps=1e12, dequant_fixed_us=0.0, **given)
    assert free.step_time_us < fast.step_time_us


def test_the_models_own_format_changes_nothing_but_no_result_of_another_is_validated(make_table, tiny_shape) -> None:
    validated = dataclasses.replace(load_hardware("h200-provisional"), status="validated")
    given = {"hardware": validated, "model_shape": tiny_shape, "schedule": "fused_kv"}
    own = simulate(make_table(misses_of()), **given)
    same = simulate(make_table(misses_of()), host_kv_dtype="bf16", **given)
    assert own.status == same.status == "validated"
    assert dataclasses.replace(same, rules=own.rules) == own
    assert simulate(make_table(misses_of()), host_kv_dtype="fp8", **given).status == "projected"


def test_formats_priced_together_cost_what_they_cost_alone() -> None:
    source = SyntheticSource(
        SyntheticWorkload(ModelShape("s", 2, 8, 2, 128, 256, 512, 1000), SparseConfig(), context=6000, batch=4, steps=5)
    )
    from nosa_sys.simulator.host_storage import host_storage

    h200 = load_hardware("h200")
    works = [source.workload(Request(storage=host_storage(name))) for name in (None, "int4", "fp8")]
    for schedule in ("serial", "split_merge", "two_batch"):
        together = price([(work, h200) for work in works], get_schedule(schedule))
        alone = [price([(work, h200)], get_schedule(schedule))[0] for work in works]
        assert together == alone


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"host_kv_dtype": "int5"}, "int5"),
        ({"dequant_gbps": 100.0}, "host_kv_dtype"),
        ({"host_kv_dtype": "int4", "dequant_gbps": 0.0}, "dequant_gbps"),
        ({"host_kv_dtype": "int4", "dequant_gbps": float("nan")}, "dequant_gbps"),
        ({"host_kv_dtype": "int4", "dequant_fixed_us": -1.0}, "dequant_fixed_us"),
        ({"host_kv_dtype": "int4:48"}, "groups of 48"),
    ],
)
def test_bad_formats_and_costs_are_refused(make_table, tiny_shape, given, words) -> None:
    with pytest.raises(ConfigError, match=words):
        simulate(make_table(misses_of()), hardware="ideal", h2d_gbps=1.0, model_shape=tiny_shape, **given)


@pytest.mark.parametrize("name", ["dequant_gbps", "dequant_fixed_us"])
def test_conversion_costs_stay_summable(name):
    with pytest.raises(ConfigError, match=rf"{name}=1e\+308 must be a finite number in"):
        host_storage("int4", **{name: 1e308})
