"""Hardware bundles: each number has a source, and anything that is not a clean bundle is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from nosa_sys.errors import HardwareError
from nosa_sys.simulator import hardware
from nosa_sys.simulator.hardware import known_profiles, load_hardware
from nosa_sys.simulator.memory import MemoryUse

BUILT_IN = Path(hardware.__file__).parent / "profiles"


@pytest.fixture
def bundle(tmp_path):
    """A copy of the provisional bundle, and a function that edits one of its files."""
    directory = tmp_path / "bundle"
    shutil.copytree(BUILT_IN / "h200-provisional", directory)

    def edit(name, change):
        path = directory / name
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))
        return directory

    return edit


def test_shipped_profiles_load_and_every_number_has_a_source():
    assert known_profiles() == ["h200", "h200-engine", "h200-provisional", "ideal"]
    for name in known_profiles():
        profile = load_hardware(name)
        assert profile.status == ("measured" if name in ("h200", "h200-engine") else "projected")
        numbers = [
            f.name
            for f in dataclasses.fields(profile)
            if f.name not in ("name", "device", "status", "sources", "engine", "link", "tables")
        ]
        assert sorted(profile.sources) == sorted(numbers)
        assert all(len(text) > 10 for text in profile.sources.values())


def test_ideal_costs_nothing_but_bytes():
    ideal = load_hardware("ideal")
    assert ideal.h2d_gbps is None
    assert ideal.d2h_gbps == ideal.hbm_gbps == ideal.gemm_tflops == math.inf
    assert ideal.h2d_fixed_us == ideal.host_per_step_us == ideal.host_per_layer_us == ideal.topk_fixed_us == 0


def test_duplex_factor_of_the_provisional_profile_gives_back_its_measurement():
    """128 MiB each way: 2.63 and 2.43 ms alone, 3.88 ms together."""
    factor = load_hardware("h200-provisional").duplex_factor
    both = 2.43 / factor
    left_of_fetch = 2.63 - both * factor
    assert both + left_of_fetch == pytest.approx(3.88, rel=0.005)


def test_fetch_cost_gives_back_the_measured_gathers():
    """64 blocks of 16 KiB 23.8 us, 512 blocks 168 us."""
    profile = load_hardware("h200-provisional")
    for blocks, measured_us in ((64, 23.8), (512, 168.0)):
        predicted = profile.h2d_fixed_us + blocks * 16384 / (profile.link_gbps * 1e3)
        assert predicted == pytest.approx(measured_us, rel=0.02)


def test_bundle_loads_from_a_directory_and_keeps_its_own_name(bundle):
    directory = bundle("meta.json", lambda d: d.update(name="mine", status="measured"))
    assert load_hardware(directory).name == "mine"
    assert load_hardware(str(directory)).status == "measured"


@pytest.mark.parametrize("value", [float("nan"), "fast", True, -1, 0, [1]])
def test_bad_numbers_are_named(bundle, value):
    directory = bundle("models.json", lambda d: d["hbm_gbps"].update(value=value))
    with pytest.raises(HardwareError, match=r"models\.json"):
        load_hardware(directory)


@pytest.mark.parametrize(
    ("file", "change", "name"),
    [
        ("models.json", lambda d: d.pop("d2h_gbps"), "d2h_gbps"),
        ("models.json", lambda d: d.update(hbm_gpbs={"value": 1, "source": "x"}), "hbm_gpbs"),
        ("models.json", lambda d: d["h2d_gbps"].pop("source"), "h2d_gbps"),
        ("models.json", lambda d: d["topk_fixed_us"].update(value=None), "topk_fixed_us"),
        ("models.json", lambda d: d["duplex_factor"].update(value=0.3), "duplex_factor"),
        ("meta.json", lambda d: d.update(schema_version=2), "schema_version"),
        ("meta.json", lambda d: d.update(status="trusted"), "status"),
        ("meta.json", lambda d: d.pop("device"), "device"),
        ("meta.json", lambda d: d.update(extra=1), "extra"),
        ("meta.json", lambda d: d.update(name=7), "name"),
    ],
)
def test_broken_bundles_name_file_and_key(bundle, file, change, name):
    directory = bundle(file, change)
    with pytest.raises(HardwareError, match=name) as caught:
        load_hardware(directory)
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("gpu_memory_bytes", 1e308), ("host_memory_bytes", 1.1e18), ("host_per_step_us", 1e200), ("gemm_tflops", 1e-300)],
)
def test_numbers_beyond_any_machine_are_refused_by_key(bundle, key, value):
    """The batch that fits in 1e308 bytes is too large for a float; so is a product that takes a step."""
    directory = bundle("models.json", lambda d: d[key].update(value=value))
    with pytest.raises(HardwareError, match=rf"models\.json: {key}=.* the limit of 1e"):
        load_hardware(directory)


def test_the_largest_memory_gives_a_whole_batch(bundle):
    limits = ("gpu_memory_bytes", "host_memory_bytes")
    directory = bundle("models.json", lambda d: [d[key].update(value=1e18) for key in limits])
    use = MemoryUse(0, slot_bytes=4, key_mean_bytes=0, beta_bytes=0, host_pool_bytes=1, batch=2)
    assert use.batch_that_fits(load_hardware(directory)) == 5 * 10**17


def test_missing_and_torn_files_are_named(bundle, tmp_path):
    directory = bundle("meta.json", lambda d: None)
    text = (directory / "models.json").read_text()
    for torn in (text[: len(text) // 2], "[]", "[" * 100_000, text.replace("2.9", "1e999")):
        (directory / "models.json").write_text(torn)
        with pytest.raises(HardwareError, match=r"models\.json"):
            load_hardware(directory)
    (directory / "models.json").unlink()
    with pytest.raises(HardwareError, match="is missing"):
        load_hardware(directory)
    with pytest.raises(HardwareError, match="h200-provisional, ideal"):
        load_hardware("h100")


def test_compute_beside_a_fetch_is_as_measured_or_not_slowed():
    """h200: the slower of two kinds of compute beside the path that disturbs it least; elsewhere nothing is known."""
    table = BUILT_IN / "h200" / "link_contention.parquet"
    kept = {}
    for row in pq.read_table(table).to_pylist():
        kept[row["compute"]] = max(kept.get(row["compute"], 0.0), row["compute_us"] / row["both_us"])
    assert load_hardware("h200").compute_beside_copy_factor == pytest.approx(min(kept.values()), rel=1e-12)
    ideal = load_hardware("ideal")
    assert ideal.compute_beside_copy_factor == 1.0
    assert "not in the bundle" in ideal.sources["compute_beside_copy_factor"]
