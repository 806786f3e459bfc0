"""Links apart from devices: what changes, what stays, and files that are no links."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from nosa_sys import simulate
from nosa_sys.errors import HardwareError
from nosa_sys.simulator.hardware import load_hardware
from nosa_sys.simulator.link import LINK_NUMBERS, known_links, load_link

HAND = {
    "name": "hand",
    "notes": "",
    "h2d_fixed_us": {"value": 2.0, "source": "by hand"},
    "h2d_gbps": {"value": 32.768, "source": "by hand"},
    "d2h_fixed_us": {"value": 1.0, "source": "by hand"},
    "d2h_gbps": {"value": 16.384, "source": "by hand"},
    "duplex_factor": {"value": 0.5, "source": "by hand"},
    "host_memory_bytes": {"value": 1e9, "source": "by hand"},
}


@pytest.fixture
def link_file(tmp_path):
    def write(**changes):
        path = tmp_path / "link.json"
        path.write_text(json.dumps({k: v for k, v in {**HAND, **changes}.items() if v is not None}))
        return path

    return write


def test_shipped_links_have_a_source_for_each_number():
    assert known_links() == ["gh200-c2c", "nvlink4-neighbour", "pcie4-x16", "pcie5-x16"]
    for name in known_links():
        link = load_link(name)
        assert link.name == name
        assert {*LINK_NUMBERS, "host_memory_bytes"} == set(link.sources)
        assert all(
            any(w in text for w in ("measured", "specification", "assumed", "profile"))
            for text in link.sources.values()
        )


def test_figures_of_the_shipped_links_come_from_where_they_say():
    """PCIe 4 is half of the measured 51.2 and 55.2; NVLink 393 measured; C2C 900 GB/s both ways."""
    assert (load_link("pcie4-x16").h2d_gbps, load_link("pcie4-x16").d2h_gbps) == (51.2 / 2, 55.2 / 2)
    assert load_link("nvlink4-neighbour").h2d_gbps == 393.0
    assert load_link("gh200-c2c").h2d_gbps + load_link("gh200-c2c").d2h_gbps == 900.0
    both = 2.43 / load_link("pcie5-x16").duplex_factor
    assert both + 2.63 - both * load_link("pcie5-x16").duplex_factor == pytest.approx(3.88, rel=0.005)


def test_a_fetch_and_a_write_back_on_a_link_of_ones_own(make_table, tiny_shape, link_file):
    """4 blocks a layer at 1 us each and 2 us; nothing else costs anything on the ideal device."""
    misses = np.ones((2, 3, 2, 2), dtype=np.int64)
    found = simulate(
        make_table(misses), hardware="ideal", link=str(link_file()), model_shape=tiny_shape, schedule="fused_kv"
    )
    assert found.step_time_us == pytest.approx(2 * (2.0 + 4.0))
    assert (found.settings["link"], found.settings["hardware"], found.status) == ("hand", "ideal", "projected")
    assert any("link hand instead of that of ideal" in line for line in found.rules)
    written = simulate(
        make_table(np.zeros((2, 3, 2, 2), dtype=np.int64), start=125), hardware="ideal", link=load_link(link_file()),
        model_shape=tiny_shape,
    )  # fmt: skip
    assert written.d2h_exposed_us == pytest.approx(2 * (1.0 + 4 * 2.0) / 2)
    assert simulate(
        make_table(misses), hardware="ideal", link=link_file(), h2d_gbps=65.536, model_shape=tiny_shape,
        schedule="fused_kv",
    ).step_time_us == pytest.approx(2 * (2.0 + 2.0))  # fmt: skip


def test_only_the_links_numbers_change(link_file):
    own = load_hardware("h200")
    moved = own.with_link(link_file())
    assert own.with_link(None) is own
    assert own.with_link("own") is own
    changed = {f.name for f in dataclasses.fields(own) if getattr(own, f.name) != getattr(moved, f.name)}
    assert changed == {*LINK_NUMBERS, "host_memory_bytes", "sources", "status", "link"}
    assert moved.sources["h2d_gbps"] == "link hand: by hand"
    capped = own.with_link(link_file(duplex_factor={"value": 1.0, "source": "by hand"}))
    assert capped.duplex_factor == own.beside_compute_factor
    kept = own.with_link(link_file(host_memory_bytes={"value": None, "source": "that of the device's profile"}))
    assert kept.host_memory_bytes == own.host_memory_bytes


@pytest.mark.parametrize("name", ["pcie4-x16", "gh200-c2c", "nvlink4-neighbour"])
def test_a_faster_link_is_never_slower(make_table, tiny_shape, name):
    rng = np.random.default_rng(1)
    table = make_table(rng.integers(0, 40, (4, 6, 2, 2)), n_selected=60)
    times = {
        link: simulate(table, hardware="h200", link=link, model_shape=tiny_shape).step_time_us
        for link in ("pcie4-x16", "pcie5-x16", name)
    }
    assert times["pcie5-x16"] < times["pcie4-x16"]
    assert name == "pcie4-x16" or times[name] < times["pcie5-x16"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"h2d_gbps": None}, "h2d_gbps"),
        ({"h2d_gbsp": {"value": 1, "source": "x"}}, "h2d_gbsp"),
        ({"h2d_gbps": {"value": 0, "source": "x"}}, "h2d_gbps"),
        ({"h2d_gbps": {"value": True, "source": "x"}}, "h2d_gbps"),
        ({"h2d_gbps": {"value": 1, "source": " "}}, "source"),
        ({"h2d_gbps": 1}, "source"),
        ({"duplex_factor": {"value": 0.4, "source": "x"}}, r"duplex_factor=0\.4"),
        ({"d2h_fixed_us": {"value": -1, "source": "x"}}, "d2h_fixed_us"),
        ({"name": "own"}, "name"),
        ({"h2d_gbps": {"value": 10**400, "source": "x"}}, "401 digits"),
        ({"h2d_gbps": {"value": 1e300, "source": "x"}}, "h2d_gbps"),
        ({"host_memory_bytes": {"value": 1e300, "source": "x"}}, "host_memory_bytes"),
    ],
)
def test_files_that_are_no_links_are_named(link_file, changes, words):
    with pytest.raises(HardwareError, match=words) as caught:
        load_link(link_file(**changes))
    assert "link.json" in str(caught.value)


def test_unknown_and_torn_links(tmp_path):
    with pytest.raises(HardwareError, match="known: own, gh200-c2c"):
        load_link("pcie9")
    for text in ("{", "[]", "[" * 100_000):
        (tmp_path / "torn.json").write_text(text)
        with pytest.raises(HardwareError, match=r"torn\.json"):
            load_link(tmp_path / "torn.json")
