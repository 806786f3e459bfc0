"""Costs of the CUDA engine's step by hand, and the file that its terms come from."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from nosa_sys.errors import HardwareError
from nosa_sys.kv_format import KvFormat
from nosa_sys.model_shape import ModelShape
from nosa_sys.simulator.engine_cost import EngineCostModel
from nosa_sys.simulator.engine_terms import EngineTerms, MatrixTimes, term_names
from nosa_sys.simulator.hardware import load_hardware
from nosa_sys.simulator.host_storage import HostStorage
from nosa_sys.simulator.link import LINK_NUMBERS, LinkDescription
from nosa_sys.simulator.schedules import get_schedule
from nosa_sys.simulator.simulate import cost_model, price, simulate
from nosa_sys.simulator.sources import SyntheticWorkload
from nosa_sys.simulator.workload import Workload
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.miss_table import LayerStepMisses

BUILT_IN = Path(__file__).parents[2] / "simulator" / "profiles"
SHAPE = ModelShape("tiny", 2, 4, 2, 128, 256, 512, 1000)
SPARSE = SparseConfig(topk=8, window_size=128, select_blocks=2)
BLOCK_BYTES = SHAPE.kv_block_bytes(64)
SHARED = ("duplex_factor", "beside_compute_factor", "compute_beside_copy_factor")


def terms(**given: float) -> EngineTerms:
    values = dict.fromkeys(term_names(), 0.0) | dict.fromkeys(SHARED, 1.0) | {"attention_places": 264.0} | given
    return EngineTerms(
        **values,
        matrices=tuple(
            MatrixTimes(n, k, (1, 8), (10.0, 24.0))
            for n, k in ((1024, 256), (256, 512), (1024, 256), (256, 512), (1000, 256))
        ),
    )


def loads(batch: int, misses: int, steps: int = 1) -> LayerStepMisses:
    cells = (steps, SHAPE.n_layers)
    return LayerStepMisses(
        steps=np.arange(steps, dtype=np.int32),
        n_sequences=np.full(steps, batch, dtype=np.int32),
        misses=np.full(cells, misses),
        filled_blocks=np.zeros(cells, dtype=np.int64),
        attended_blocks=np.full(cells, batch * 2 * 8),
        context_tokens=np.full(steps, batch * 6400),
        cold=np.zeros(steps, dtype=np.bool_),
    )


def workload(batch: int, misses: int, method: str = "nosa") -> Workload:
    whole, half = loads(batch, misses), loads(max(1, batch // 2), misses // 2)
    slots = 0 if method == "full" else 8
    return Workload(
        whole, SHAPE, SPARSE, method, slots, "exact", BLOCK_BYTES, BLOCK_BYTES, batch, 6400, True, half
    )  # fmt: skip


def step_us(schedule: str, work: Workload, given: EngineTerms) -> float:
    profile = dataclasses.replace(load_hardware("h200"), engine=given)
    return price([(work, profile)], get_schedule(schedule))[0].step_time_us


def test_matrices_are_interpolated_and_scaled_and_the_head_is_once_a_step() -> None:
    """4 rows: 10 + 3 / 7 * 14 = 16 us a product, four of them a layer, twice as long in the step; the head unscaled."""
    us = step_us("fused_kv", workload(4, 0), terms(rest_matrix_scale=2.0, step_head_scale=1.0))
    assert us == pytest.approx(2 * 4 * 16 * 2 + 16)


def test_two_batch_reads_matrices_twice() -> None:
    """Halves of 2 rows take 12 us a product."""
    us = step_us("two_batch", workload(4, 0), terms(rest_matrix_scale=1.0))
    assert us == pytest.approx(2 * 4 * 12 * 2)


def test_launches_that_find_nothing_still_cost_their_fixed_part() -> None:
    """Without a miss: serial two fetches a layer, fused_kv one, split_merge a fetch, two attentions and a merge."""
    given = terms(fetch_alone_fixed_us=3, fetch_beside_fixed_us=5, attention_fixed_us=7, merge_fixed_us=2)
    assert step_us("serial", workload(4, 0), given) == pytest.approx(2 * (2 * 3 + 7))
    assert step_us("fused_kv", workload(4, 0), given) == pytest.approx(2 * (3 + 7))
    assert step_us("split_merge", workload(4, 0), given) == pytest.approx(2 * (7 + 7 + 2))


def test_a_fetch_takes_the_path_of_its_schedule() -> None:
    given = terms(fetch_alone_us_per_mb=20, fetch_beside_us_per_mb=30)
    mb = 8 * BLOCK_BYTES / 1e6
    assert step_us("fused_kv", workload(4, 8), given) == pytest.approx(2 * 20 * mb)
    assert step_us("split_merge", workload(4, 8), given) == pytest.approx(2 * 30 * mb)


@pytest.mark.parametrize("schedule", ["fused_kv", "split_merge"])
def test_another_link_moves_the_engines_fetches_too(schedule: str) -> None:
    """Half the bandwidth: every megabyte takes twice as long on both paths, launches what they took."""
    profile = load_hardware("h200")
    assert profile.h2d_gbps is not None
    given = terms(fetch_alone_us_per_mb=20, fetch_beside_us_per_mb=20, fetch_alone_fixed_us=3, fetch_beside_fixed_us=3)
    slow = dataclasses.replace(profile, engine=given).with_h2d_gbps(profile.h2d_gbps / 2)
    found = price([(workload(4, 8), slow)], get_schedule(schedule))[0].step_time_us
    assert found == pytest.approx(2 * (3 + 2 * 20 * 8 * BLOCK_BYTES / 1e6))


@pytest.mark.parametrize("schedule", ["fused_kv", "split_merge"])
def test_a_link_shifts_the_engines_launches_and_shares_both_directions(schedule: str) -> None:
    """4 us more a launch at half the bandwidth, on both paths; the share of the link, where the device keeps more."""
    profile = load_hardware("h200")
    given = terms(fetch_alone_us_per_mb=20, fetch_beside_us_per_mb=20, fetch_alone_fixed_us=3, fetch_beside_fixed_us=3)
    link = LinkDescription(
        "hand",
        profile.h2d_fixed_us + 4,
        profile.link_gbps / 2,
        1.0,
        10.0,
        0.6,
        None,
        dict.fromkeys(LINK_NUMBERS, "hand"),
    )
    moved = dataclasses.replace(profile, engine=given).with_link(link)
    found = price([(workload(4, 8), moved)], get_schedule(schedule))[0].step_time_us
    assert found == pytest.approx(2 * (7 + 2 * 20 * 8 * BLOCK_BYTES / 1e6))
    assert moved.engine is not None
    assert moved.engine.sharing.duplex_factor == 0.6


def test_the_engine_moves_and_converts_blocks_of_the_hosts_format() -> None:
    """A layer fetches 8 blocks of 8,704 bytes and writes 4; each converts 41,472 bytes in 1 us, 5 us a launch."""
    whole = workload(4, 8)
    filled = np.full((1, SHAPE.n_layers), 4, dtype=np.int64)
    work = dataclasses.replace(whole, loads=dataclasses.replace(whole.loads, filled_blocks=filled))
    work = work.stored_as(HostStorage(KvFormat.parse("int4"), dequant_gbps=41.472, dequant_fixed_us=5.0))
    profile = dataclasses.replace(load_hardware("h200"), engine=terms(fetch_alone_us_per_mb=20.0))
    found = price([(work, profile)], get_schedule("fused_kv"))[0]
    assert (found.h2d_bytes_total, found.d2h_bytes_total) == (2 * 8 * 8704, 2 * 4 * 8704)
    assert found.h2d_exposed_us == pytest.approx(2 * 20 * 8 * 8704 / 1e6)
    assert found.conversion_us == pytest.approx(2 * (8 + 5 + 4 + 5))
    assert found.status == "projected"


def test_a_layer_that_misses_waits_once_more_however_many_launches() -> None:
    given = terms(fetch_alone_layer_us=6, fetch_alone_fixed_us=1)
    assert step_us("serial", workload(4, 8), given) == pytest.approx(2 * (6 + 2))
    assert step_us("fused_kv", workload(4, 8), given) == pytest.approx(2 * (6 + 1))
    assert step_us("fused_kv", workload(4, 0), given) == pytest.approx(2)


def test_selection_grows_with_heads_blocks_slots_and_bytes() -> None:
    """4 rows of 6400 tokens: blocks are scored, 8 heads, 100 blocks a row, 8 x 8 comparisons; 1600 windows of 2 KV
    heads x (128 + 1) floats and 4 query heads x 8 bytes of logits."""
    work = workload(4, 0)
    mb = 1600 * (2 * 4 * 129 + 4 * 8) / 1e6
    for name, size in (
        ("select_score_us", 1),
        ("select_us_per_head", 8),
        ("select_us_per_block", 100),
        ("select_us_per_compare", 64 / 1e3),
        ("select_us_per_mb", mb),
    ):
        assert step_us("fused_kv", work, terms(**{name: 1.0})) == pytest.approx(2 * size)


def test_what_scores_no_block_pays_for_no_scores() -> None:
    assert step_us("fused_kv", workload(4, 0, "dma"), terms(select_score_us=1.0)) == 0


@pytest.mark.parametrize(("schedule", "launches"), [("fused_kv", 1), ("split_merge", 2)])
def test_attention_pays_for_its_ctas_in_every_launch(schedule: str, launches: int) -> None:
    """4 rows x 2 KV heads with 8 blocks each: with room for 264 CTAs every block has one of its own."""
    given = terms(attention_us_per_cta=1.0)
    assert step_us(schedule, workload(4, 0), given) == pytest.approx(2 * launches * 8 * 8)


@pytest.mark.parametrize(("schedule", "times"), [("serial", 0), ("fused_kv", 0), ("split_merge", 1), ("two_batch", 2)])
def test_streams_that_part_and_meet_cost_compute(schedule: str, times: int) -> None:
    """Two halves of two_batch part and meet each for itself, whatever is fetched."""
    assert step_us(schedule, workload(4, 0), terms(fork_us=5.0)) == pytest.approx(2 * times * 5)


def test_dense_attention_appends_and_attends_and_fetches_nothing() -> None:
    given = terms(append_us=4, select_fixed_us=50, dense_attention_fixed_us=6, fetch_alone_fixed_us=9)
    assert step_us("fused_kv", workload(4, 0, "full"), given) == pytest.approx(2 * (4 + 6))


def test_small_blocks_cost_extra() -> None:
    sparse = SparseConfig(block_size=32, topk=8, window_size=64, select_blocks=2)
    profile = dataclasses.replace(
        load_hardware("h200"), engine=terms(attention_us_per_mb=1.0, attention_us_per_small_mb=2.0)
    )
    blocks = np.array([[1000]])
    large = EngineCostModel(profile, SHAPE, SPARSE, "nosa", 0, 1000, slots=8).attention_us(blocks)
    small = EngineCostModel(profile, SHAPE, sparse, "nosa", 0, 1000, slots=8).attention_us(blocks)
    assert (large.item(), small.item()) == pytest.approx((1.0, 3.0))


def test_more_rows_than_were_timed_are_refused() -> None:
    with pytest.raises(HardwareError, match="9 rows exceed the 8"):
        step_us("fused_kv", workload(9, 0), terms())


def test_an_engine_file_in_a_bundle_is_read_back(tmp_path: Path) -> None:
    shutil.copytree(BUILT_IN / "h200", tmp_path / "b")
    given = terms(append_us=4.5)
    (tmp_path / "b" / "engine.json").write_text(json.dumps(given.to_dict()))
    profile = load_hardware(tmp_path / "b")
    assert profile.engine is not None
    assert profile.engine.append_us == 4.5
    assert profile.engine.matrices == given.matrices
    assert isinstance(cost_model(workload(2, 0), profile), EngineCostModel)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["terms"].pop("append_us"), "append_us"),
        (lambda d: d["terms"].update(new={"value": 1, "source": "x"}), "new"),
        (lambda d: d["terms"]["append_us"].update(value=-1), "append_us=-1"),
        (lambda d: d["terms"]["append_us"].update(value=True), "append_us=True"),
        (lambda d: d["matrices"][0].update(rows=[8, 1]), "ascending rows"),
        (lambda d: d.pop("matrices"), "exactly the keys"),
        (lambda d: d["terms"]["duplex_factor"].update(value=0.1), "duplex_factor"),
    ],
)
def test_a_broken_engine_file_is_named(tmp_path: Path, change, message: str) -> None:
    shutil.copytree(BUILT_IN / "h200", tmp_path / "b")
    data = json.loads(json.dumps(terms().to_dict()))
    change(data)
    (tmp_path / "b" / "engine.json").write_text(json.dumps(data))
    with pytest.raises(HardwareError, match=message):
        load_hardware(tmp_path / "b")


def test_a_model_whose_matrices_were_not_timed_is_said_to_be() -> None:
    """The bundle timed matrices of nosa-8b and llama-3-8b alone."""

    def told(model_shape: str) -> list[str]:
        work = SyntheticWorkload(ModelShape.preset(model_shape), SPARSE, context=8192, batch=2, steps=2)
        return [rule for rule in simulate(work, hardware="h200-engine").rules if "timed no matrices" in rule]

    assert told("nosa-8b") == told("llama-3-8b") == []
    (rule,) = told("smollm2-135m")  # hidden 576, 9 and 3 heads of 64, MLP 1536, vocabulary 49152
    assert "(960 x 576, 576 x 576, 3072 x 576, 576 x 1536, 49152 x 576)" in rule
