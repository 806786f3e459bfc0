"""What each schedule orders: plain loops and figures by hand as oracles, and the rules that hold for all of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys import ModelShape, SparseConfig, simulate
from nosa_sys.errors import CapacityError, ConfigError
from nosa_sys.simulator.hardware import load_hardware
from nosa_sys.simulator.rates import LinkSharing
from nosa_sys.simulator.schedules import SCHEDULES, get_schedule
from nosa_sys.simulator.sources import SyntheticWorkload
from nosa_sys.simulator.step_times import AttentionSplit, Speculation, StepCosts
from nosa_sys.simulator.workload import first_half_of, second_half

ALL = pytest.mark.parametrize("name", list(SCHEDULES))
SHAPE = ModelShape("tiny", 2, 4, 2, 128, 256, 512, 1000)


class Link:
    """One direction at full speed: transfers one after another, an empty one is none."""

    def __init__(self):
        self.end = 0.0

    def post(self, now, *work):
        if sum(work):
            self.end = max(self.end, now) + sum(work)
            return self.end
        return 0.0


def plain_step(name, c, row):
    """Step time of one instance with nothing shared: a loop over layers that follows the rule in words."""
    h2d, d2h = Link(), Link()
    now = c.step_host_us[row]

    def at(values, layer):
        return values[row, layer]

    def select(costs, now, layer):
        now += at(costs.host_us, layer) + at(costs.select_us, layer)
        d2h.post(now, at(costs.d2h_fixed_us, layer), at(costs.d2h_us, layer))
        fixed = at(costs.h2d_fixed_us, layer) * (2 if name == "serial" else 1)
        return now, h2d.post(now, fixed, at(costs.h2d_us, layer))

    if name == "two_batch":
        arrived = [0.0, 0.0]
        for index, half in enumerate(c.halves):
            now, arrived[index] = select(half, now, 0)
        for layer in range(c.n_layers):
            for index, half in enumerate(c.halves):
                now = max(now, arrived[index]) + at(half.attention_us, layer) + at(half.gemm_us, layer)
                if layer + 1 < c.n_layers:
                    now, arrived[index] = select(half, now, layer + 1)
    else:
        for layer in range(c.n_layers):
            now, arrived = select(c, now, layer)
            if name == "split_merge":
                now += at(c.attention_split.hit_us, layer)
                now = max(now, arrived) + at(c.attention_split.miss_us, layer)
            else:
                now = max(now, arrived) + at(c.attention_us, layer)
                if name == "prefetch":
                    h2d.post(now, at(c.speculation.fixed_us, layer), at(c.speculation.bytes_us, layer))
            now += at(c.gemm_us, layer)
    return max(now + c.tail_us[row], h2d.end, d2h.end)


@ALL
def test_a_step_without_shared_rates_equals_a_plain_loop(name, random_costs):
    for seed in range(40):
        rng = np.random.default_rng(seed)
        costs = random_costs(rng, 4, int(rng.integers(1, 7)), 1.0, 1.0, 1.0)
        expected = [plain_step(name, costs, row) for row in range(4)]
        np.testing.assert_allclose(SCHEDULES[name].recurrence(costs).step_us, expected, rtol=1e-12)


def one_layer(sharing=None, **values):
    """One instance of one layer (or as many as a list has); what is not given costs nothing."""
    layers = max([1, *(len(v) for v in values.values() if isinstance(v, list))])
    names = [f.name for f in dataclasses.fields(StepCosts) if f.name.endswith("_us")]
    arrays = {name: np.zeros((1, layers)) for name in names}
    arrays |= {"step_host_us": np.zeros(1), "tail_us": np.zeros(1)}
    arrays |= {name: np.array([v], float) for name, v in values.items()}
    zeros = np.zeros((1, layers), np.int64)
    return StepCosts(**arrays, h2d_bytes=zeros, d2h_bytes=zeros, sharing=sharing or LinkSharing())


def both(name, costs):
    schedule = SCHEDULES[name]
    return schedule.recurrence(costs), schedule.simpy(costs)[0]


def test_serial_pays_the_fixed_cost_of_a_fetch_twice_and_only_where_blocks_are_missed():
    costs = one_layer(h2d_fixed_us=[3, 0], h2d_us=[10, 0], attention_us=[5, 5])
    for name, fetch in (("serial", 16.0), ("fused_kv", 13.0)):
        for times in both(name, costs):
            assert times.h2d_exposed_us.tolist() == [fetch]
            assert times.step_us.tolist() == [fetch + 10]


def test_serial_hides_no_fetch_not_even_a_rounding_error():
    """Busy and exposed time are the same sum in another order."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        h2d, attention, gemm = (rng.exponential(20.0, 30).tolist() for _ in range(3))
        for times in both("serial", one_layer(h2d_us=h2d, attention_us=attention, gemm_us=gemm)):
            assert times.h2d_exposed_us == pytest.approx([sum(h2d)])
            assert times.h2d_hidden_us.tolist() == [0.0]


def test_split_merge_hides_the_fetch_behind_the_hits_and_slows_both_by_hand():
    """20 us of hits at 0.8 beside 25 us of fetch at 0.5: 25 us of both, 12.5 us of fetch alone, 4 us of misses."""
    costs = dataclasses.replace(
        one_layer(LinkSharing(0.5, 0.5, 0.8), h2d_us=[25], attention_us=[99], gemm_us=[7]),
        attention_split=AttentionSplit(np.array([[20.0]]), np.array([[4.0]])),
    )
    for times in both("split_merge", costs):
        assert times.attention_us == pytest.approx([25 + 4])
        assert times.h2d_exposed_us == pytest.approx([12.5])
        assert times.h2d_hidden_us == pytest.approx([25])
        assert times.step_us == pytest.approx([25 + 12.5 + 4 + 7])


def test_two_batch_computes_one_half_while_the_other_arrives_by_hand():
    """Two layers, both halves fetch 10 us and compute 10 us: only the first fetch is seen, and B's is done by 20."""
    half = one_layer(h2d_us=[10, 10], gemm_us=[10, 10])
    costs = dataclasses.replace(half, halves=(half, half))
    for times in both("two_batch", costs):
        assert times.h2d_exposed_us.tolist() == [10.0]  # A 0: 0-10; B 0: 10-20; A 1: 20-30 beside B; B 1: 30-40
        assert times.h2d_hidden_us.tolist() == [30.0]
        assert times.step_us.tolist() == [50.0]


def test_two_batch_with_an_empty_half_is_fused_kv(random_costs):
    costs = random_costs(np.random.default_rng(1), 3, 4)
    nothing = dataclasses.replace(
        costs,
        **{f.name: np.zeros_like(getattr(costs, f.name)) for f in dataclasses.fields(costs) if f.name.endswith("_us")},
    )
    halved = dataclasses.replace(costs, halves=(costs, nothing))
    left, right = SCHEDULES["two_batch"].recurrence(halved), SCHEDULES["fused_kv"].recurrence(costs)
    np.testing.assert_allclose(left.step_us, right.step_us, rtol=1e-12)


def test_a_guess_delays_the_next_fetch_and_holds_the_step_to_its_end_by_hand():
    """Twice fetch 10, attention 5, rest 5 with a guess of 30 from its attention on: 15-45, so the second fetch runs
    45-55, its attention to 60, its rest to 65, its guess to 90."""
    guess = np.array([[30.0, 30.0]])
    whole = np.zeros((1, 2), np.int64)
    costs = dataclasses.replace(
        one_layer(h2d_us=[10, 10], attention_us=[5, 5], gemm_us=[5, 5]),
        speculation=Speculation(np.zeros((1, 2)), guess, whole, whole),
    )
    for times in both("prefetch", costs):
        assert times.h2d_exposed_us == pytest.approx([10 + (55 - 20) + (90 - 65)])
        assert times.step_us == pytest.approx([90.0])


@ALL
def test_an_empty_fetch_waits_for_nothing(name, random_costs):
    """Without a miss a step is as long as its GPU stream, whatever the link's speed; guesses apart."""
    costs = random_costs(np.random.default_rng(2), 5, 3)

    def all_hits(c):
        zeros = np.zeros_like(c.h2d_us)
        return dataclasses.replace(c, h2d_us=zeros, h2d_fixed_us=zeros, d2h_us=zeros, d2h_fixed_us=zeros)

    no_guess = Speculation(*(np.zeros_like(costs.h2d_us) for _ in range(2)), costs.h2d_bytes, costs.h2d_bytes)
    hits = dataclasses.replace(all_hits(costs), halves=tuple(map(all_hits, costs.halves)), speculation=no_guess)
    times = SCHEDULES[name].recurrence(hits)
    assert np.all(times.h2d_exposed_us == 0)
    np.testing.assert_allclose(
        times.step_us, times.host_us + times.select_us + times.attention_us + times.gemm_us, rtol=1e-12
    )


@ALL
@pytest.mark.parametrize("fixed_us", [0.0, 5.0])
@given(seed=st.integers(0, 100_000), speedup=st.floats(1.0, 8.0))
def test_more_bandwidth_is_never_slower(name, fixed_us, seed, speedup):
    """Exactly, where write-backs have no fixed part; else never later than by the fixed parts of the step's own."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(1, 6))
    duplex = rng.uniform(0.5, 1.0)
    sharing = LinkSharing(duplex, rng.uniform(duplex, 1.0), rng.uniform(0.5, 1.0))

    def durations():
        return rng.exponential(10.0 ** rng.uniform(0, 2), (4, layers)) * (rng.random((4, layers)) < 0.7)

    timed = ("host_us", "select_us", "h2d_us", "attention_us", "gemm_us", "d2h_us")
    drawn = [{n: durations() for n in timed} for _ in range(3)]
    split, guess = AttentionSplit(durations(), durations()), durations()
    nothing, zeros = np.zeros((4, layers), dtype=np.int64), np.zeros(4)
    late = [np.where(d["d2h_us"] > 0, fixed_us, 0.0) for d in drawn]

    def at(h2d_speed, d2h_speed):
        whole, *halves = (
            StepCosts(
                **{**d, "h2d_us": d["h2d_us"] / h2d_speed, "d2h_us": d["d2h_us"] / d2h_speed},
                h2d_fixed_us=np.where(d["h2d_us"] > 0, 3.0, 0.0), d2h_fixed_us=fixed, step_host_us=zeros, tail_us=zeros,
                h2d_bytes=nothing, d2h_bytes=nothing, sharing=sharing,
            )
            for d, fixed in zip(drawn, late, strict=True)
        )  # fmt: skip
        speculation = Speculation(np.where(guess > 0, 3.0, 0.0), guess / h2d_speed, nothing, nothing)
        return dataclasses.replace(whole, halves=tuple(halves), attention_split=split, speculation=speculation)

    schedule = SCHEDULES[name]
    allowed = (late[1] + late[2] if name == "two_batch" else late[0]).sum(axis=1)
    slow = schedule.recurrence(at(1.0, 1.0)).step_us * (1 + 1e-9) + allowed
    assert np.all(schedule.recurrence(at(speedup, 1.0)).step_us <= slow)
    assert np.all(schedule.recurrence(at(1.0, speedup)).step_us <= slow)


def predictions(**changes):
    """Predictions of every schedule for one synthetic workload with room for 4 guesses a head."""
    work = SyntheticWorkload(
        SHAPE,
        SparseConfig(topk=32, select_blocks=8),
        **{"context": 8192, "batch": 5, "steps": 40, "slots": 36, **changes},
    )
    return {name: simulate(work, hardware="h200", schedule=name) for name in SCHEDULES}


def test_every_schedule_moves_the_same_bytes_but_for_what_a_guess_spares():
    found = predictions()
    serial = found["serial"]
    assert min(serial.h2d_bytes_total, serial.d2h_bytes_total) > 0
    for name, prediction in found.items():
        assert prediction.settings["schedule"] == name
        assert prediction.d2h_bytes_total == serial.d2h_bytes_total
        spared = prediction.prefetch_bytes_total - prediction.wasted_prefetch_bytes_total
        assert prediction.h2d_bytes_total + spared == serial.h2d_bytes_total
        assert (prediction.prefetch_bytes_total > 0) == (name == "prefetch")
        assert prediction.rules[0].startswith(f"{name}: ")


def test_schedules_differ_by_what_they_pay():
    found = predictions()
    fetching_layers = (found["serial"].h2d_exposed_us - found["fused_kv"].h2d_exposed_us) / load_hardware(
        "h200"
    ).h2d_fixed_us
    assert 0 < fetching_layers <= SHAPE.n_layers + 1e-9
    assert found["two_batch"].gemm_us > found["fused_kv"].gemm_us
    assert found["split_merge"].attention_us > found["fused_kv"].attention_us
    assert found["split_merge"].h2d_exposed_us < found["fused_kv"].h2d_exposed_us


def test_one_sequence_has_no_second_half():
    found = predictions(batch=1)
    assert found["two_batch"].step_time_us == pytest.approx(found["fused_kv"].step_time_us, rel=1e-12)


def test_halves_of_a_recorded_table_follow_its_sequences(make_table):
    """3 sequences: the first is one half, and the only one that misses: 3 blocks for each of 2 heads."""
    misses = np.zeros((3, 4, 2, 2), dtype=int)
    misses[0] = 3
    sparse = SparseConfig(topk=8, window_size=128, select_blocks=2)
    table = make_table(misses)

    first = first_half_of(table)
    assert first.misses.tolist() == [[6, 6]] * 4
    assert first.n_sequences.tolist() == [1] * 4
    rest = second_half(table.per_layer_step(), first)
    assert not rest.misses.any()
    assert rest.n_sequences.tolist() == [2] * 4
    assert (first.context_tokens + rest.context_tokens == table.per_layer_step().context_tokens).all()

    def outcome(schedule):
        found = simulate(table, model_shape=SHAPE, sparse=sparse, hardware="ideal", h2d_gbps=10.0, schedule=schedule)
        return found.h2d_bytes_total, found.step_time_us

    assert outcome("two_batch") == pytest.approx(outcome("fused_kv"))  # nothing else takes time, the bytes are equal


def test_guesses_spare_at_most_their_share_and_never_in_a_cold_step():
    work = SyntheticWorkload(SHAPE, SparseConfig(topk=32, select_blocks=8), context=8192, batch=2, steps=30, slots=40)
    serial = simulate(work, hardware="h200", schedule="fused_kv")
    for share in (0.0, 0.25, 1.0):
        found = simulate(work, hardware="h200", schedule="prefetch", prefetch_blocks=4, prefetch_hit_share=share)
        per_step = 4 * 2 * SHAPE.n_layers * SHAPE.n_kv_heads * SHAPE.kv_block_bytes(64)
        assert found.prefetch_bytes_total == 30 * per_step
        spared = serial.h2d_bytes_total - found.h2d_bytes_total
        assert 0 <= spared <= share * 29 * per_step
        assert (spared > 0) == (share > 0)
        assert found.cold_h2d_bytes == serial.cold_h2d_bytes
        assert found.status == "projected"
        assert any("assumed, not measured" in rule for rule in found.rules)


def test_prefetch_without_spare_slots_is_refused_with_the_slots_it_needs():
    work = SyntheticWorkload(SHAPE, SparseConfig(topk=32, select_blocks=8), context=8192, steps=4)
    with pytest.raises(CapacityError, match=r"slots >= topk \+ 1 = 33"):
        simulate(work, hardware="h200", schedule="prefetch")
    with pytest.raises(CapacityError, match=r"slots >= topk \+ 9 = 41"):
        simulate(dataclasses.replace(work, slots=40), hardware="h200", schedule="prefetch", prefetch_blocks=9)


@pytest.mark.parametrize("given_values", [{"prefetch_blocks": 0}, {"prefetch_hit_share": 1.5}])
def test_guesses_out_of_range_or_of_another_schedule_are_refused(given_values):
    with pytest.raises(ConfigError, match=next(iter(given_values))):
        get_schedule("prefetch", **given_values)
    with pytest.raises(ConfigError, match="need schedule prefetch"):
        get_schedule("serial", **given_values)
