"""SimPy and the recurrence give the same times, and both give the times worked out by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nosa_sys.errors import ConfigError, HardwareError
from nosa_sys.simulator.invariants import SimulatorFault
from nosa_sys.simulator.pipeline import Machine
from nosa_sys.simulator.program import D2H, H2D, SELECT
from nosa_sys.simulator.rates import LinkSharing, shared_rates
from nosa_sys.simulator.schedules import SCHEDULES, get_schedule
from nosa_sys.simulator.step_times import StepCosts, StepTimes

SERIAL, FUSED = get_schedule("serial"), get_schedule("fused_kv")


def costs(h2d, d2h, attention, sharing=None, **others):
    """One instance of as many layers as the lists are long; everything else costs nothing unless given."""
    layers = len(h2d)
    zeros = np.zeros((1, layers))
    values = {f.name: zeros for f in dataclasses.fields(StepCosts) if f.name.endswith("_us")}
    values |= {"step_host_us": np.zeros(1), "tail_us": np.zeros(1)}
    values |= {"h2d_us": np.array([h2d], float), "d2h_us": np.array([d2h], float)}
    values |= {"attention_us": np.array([attention], float)}
    values |= {name: np.array(v, float) for name, v in others.items()}
    return StepCosts(
        **values,
        h2d_bytes=np.zeros((1, layers), np.int64),
        d2h_bytes=np.zeros((1, layers), np.int64),
        sharing=sharing or LinkSharing(),
    )


def both(given_costs, schedule=FUSED):
    fast, (slow, _) = schedule.recurrence(given_costs), schedule.simpy(given_costs)
    return fast, slow


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize("block", range(4))
def test_recurrence_equals_simpy_on_200_random_configurations(block, schedule, random_costs):
    for seed in range(block * 50, block * 50 + 50):
        rng = np.random.default_rng(seed)
        alone = [(1.0, 1.0, 1.0), (None, None, 1.0), (None, None, None)][seed % 3]
        fast, slow = both(random_costs(rng, 1, int(rng.integers(1, 9)), *alone), schedule)
        for field in dataclasses.fields(StepTimes):
            left, right = getattr(fast, field.name), getattr(slow, field.name)
            # parts that cancel (an exposed end of almost nothing) are compared at the scale of their step
            np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-9 * float(slow.step_us.max()))


def test_shared_link_by_hand():
    """A 60 us fetch beside a 30 us write-back, both at half speed: 60 us together, then 30 us of fetch alone."""
    for times in both(costs([60], [30], [10], LinkSharing(0.5, 1.0))):
        assert times.h2d_exposed_us == pytest.approx([90.0])
        assert times.d2h_hidden_us == pytest.approx([60.0])
        assert times.step_us == pytest.approx([100.0])


def test_write_back_slowed_by_compute_by_hand():
    """40 us of write-back at 0.8 beside 20 us of attention: 16 us done there, the other 24 us alone afterwards."""
    for times in both(costs([0], [40], [20], LinkSharing(0.8, 0.8))):
        assert times.step_us == pytest.approx([44.0])
        assert times.d2h_exposed_us == pytest.approx([24.0])
        assert times.d2h_hidden_us == pytest.approx([20.0])


def test_latency_moves_no_byte_and_slows_nobody():
    """The write-back's 5 us of latency and the fetch's 3 us do not share; bytes overlap from 5 us on."""
    given_costs = costs([10], [10], [0], LinkSharing(0.5, 1.0), h2d_fixed_us=[[3]], d2h_fixed_us=[[5]])
    for times in both(given_costs):
        # fetch: alone 3..5 (2 us of work), then 8 us of work at half speed until 21; write-back: 8 of 10 us by then
        assert times.h2d_exposed_us == pytest.approx([21.0])
        assert times.step_us == pytest.approx([23.0])


def test_case_27_two_transfers_on_one_link_and_on_both():
    """Two 1 ms transfers posted together: one direction ends at 2 ms, opposite directions at 1 ms in full duplex."""
    machine = Machine(LinkSharing())
    for layer in range(2):
        machine.h2d.post(layer, 0.0, 1000.0, 1)
    machine.env.run()
    assert machine.h2d.end_us == machine.env.now == 2000.0
    assert machine.h2d.busy_us == 2000.0

    machine = Machine(LinkSharing())
    machine.h2d.post(0, 0.0, 1000.0, 1)
    machine.d2h.post(0, 0.0, 1000.0, 1)
    machine.env.run()
    assert machine.h2d.end_us == machine.d2h.end_us == 1000.0
    assert "one after another" in FUSED.rule


def test_case_26_compute_and_transfer_add_up_without_overlap():
    """2 ms of compute and 1 ms of transfer are 3 ms in the serial schedule: 1,333.3 tok/s at batch 4."""
    for times in both(costs([1000], [0], [2000])):
        assert times.step_us.tolist() == [3000.0]
        assert 4 / (times.step_us[0] / 1e6) == pytest.approx(1333.3, abs=0.05)


def test_no_event_is_left_after_a_step(random_costs):
    machine = Machine(LinkSharing(0.6, 0.9))

    def stream():
        machine.d2h.post(0, 2.0, 70.0, 1)
        yield from machine.gpu(SELECT, "select", 0, 5.0)
        yield machine.h2d.post(0, 1.0, 30.0, 1)

    machine.run(stream())
    assert machine.env.peek() == float("inf")
    assert machine.env.now == max(machine.gpu_end_us, machine.d2h.end_us)


def test_rates_of_every_combination():
    sharing = LinkSharing(0.6, 0.9, 0.8)
    assert shared_rates(False, True, False, sharing)[0] == 1.0
    assert shared_rates(False, True, True, sharing)[0] == 0.6
    assert shared_rates(True, False, True, sharing) == (0.9, 1.0)  # a write-back slows no compute
    assert shared_rates(True, True, False, sharing) == (0.9, 0.8)
    assert shared_rates(True, True, True, sharing) == (pytest.approx(0.54), 0.8)


@pytest.mark.parametrize("factors", [(0.4, 1.0), (0.9, 0.8), (0.6, 1.1), (float("nan"), 1.0)])
def test_factors_that_would_make_a_faster_link_slower_are_refused(factors):
    with pytest.raises(HardwareError, match="duplex_factor"):
        LinkSharing(*factors)


@pytest.mark.parametrize("factor", [0.4, 1.1, float("nan")])
def test_compute_factors_out_of_range_are_refused(factor):
    with pytest.raises(HardwareError, match="compute_beside_copy_factor"):
        LinkSharing(1.0, 1.0, factor)


def test_concatenated_configurations_keep_their_own_sharing(random_costs):
    rng = np.random.default_rng(5)
    parts = [random_costs(rng, 3, 4), random_costs(rng, 2, 4, 1.0, 1.0), random_costs(rng, 4, 4)]
    together = SERIAL.recurrence(StepCosts.concatenate(parts)).step_us
    alone = np.concatenate([SERIAL.simpy(p)[0].step_us for p in parts])
    np.testing.assert_allclose(together, alone, rtol=1e-9)


def test_broken_times_are_a_fault_of_the_simulator():
    times = SERIAL.recurrence(costs([10], [0], [5]))
    alone = (np.array([10.0]), np.array([0.0]))
    with pytest.raises(SimulatorFault, match="add up"):
        dataclasses.replace(times, step_us=times.step_us + 1).check(*alone)
    with pytest.raises(SimulatorFault, match="negative"):
        dataclasses.replace(times, gemm_us=np.array([-1.0])).check(*alone)
    with pytest.raises(SimulatorFault, match="less than its time alone"):
        dataclasses.replace(times, h2d_exposed_us=np.array([9.0]), gemm_us=np.array([1.0])).check(*alone)


def test_unknown_schedule_is_refused():
    with pytest.raises(ConfigError, match="serial"):
        get_schedule("three_batch")


def test_spans_lie_within_the_step(random_costs):
    given_costs = random_costs(np.random.default_rng(3), 2, 3)
    times, spans = FUSED.simpy(given_costs)
    for row, pieces in enumerate(spans):
        assert max(p.end_us for p in pieces) == pytest.approx(times.step_us[row])
        assert {p.track for p in pieces} <= {"gpu", "host", H2D, D2H}
        moved = sum(p.n_bytes for p in pieces if p.track == H2D)
        assert moved == given_costs.h2d_bytes[row].sum()
