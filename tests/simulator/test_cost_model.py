"""The cost model's forms, each against figures worked out by hand."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from nosa_sys import ModelShape, SparseConfig
from nosa_sys.errors import HardwareError
from nosa_sys.simulator import hardware as hardware_module
from nosa_sys.simulator.cost_model import CostModel
from nosa_sys.simulator.hardware import HardwareProfile, load_hardware

SHAPE = ModelShape("hand", 2, 4, 2, 16, 64, 128, 1000, dtype="float32")


def _model(method: str = "nosa", **numbers: float) -> CostModel:
    profile: HardwareProfile = dataclasses.replace(load_hardware("ideal"), **numbers)
    return CostModel(profile, SHAPE, SparseConfig(), method, 1000, 2000)


def test_attention_has_a_fixed_part_only_where_it_runs() -> None:
    """3 blocks of 2,000 bytes at 2 GB/s are 3 us."""
    model = _model(attention_fixed_us=9.0, hbm_gbps=2.0)
    assert model.attention_us(np.array([[0, 3]])).tolist() == [[0.0, 12.0]]


@pytest.mark.parametrize(
    ("overlap", "n_sequences", "expected_us"),
    [
        (1.0, 1, 4 * 5 + 2.0),  # one row reads 4,000 bytes at 2 GB/s
        (1.0, 2, 4 * 5 + 4.0),  # more rows read at 1 GB/s; multiplying takes 2 us
        (1.0, 8, 4 * 5 + 8.0),  # multiplying, 16,000 FLOPs at 2 GFLOP/s, is the longer
        (0.0, 8, 4 * 5 + 8.0 + 4.0),  # nothing hides: both add up
        (0.25, 8, 4 * 5 + 8.0 + 3.0),
    ],
)
def test_matrices_read_and_multiply(overlap: float, n_sequences: int, expected_us: float) -> None:
    model = _model(
        gemm_fixed_us=5.0, gemv_weight_gbps=2.0, gemm_weight_gbps=1.0, gemm_tflops=0.002, gemm_overlap=overlap
    )
    assert model.matrix_us(1000, 4, np.array([n_sequences])).tolist() == pytest.approx([expected_us])


def test_selection_adds_fixed_rows_and_two_passes_over_the_blocks() -> None:
    """3 sequences x 2 heads: 7 + 6 x 0.5; 640 tokens are 10 blocks x 2 heads, 0.1 us each, twice. Dense: nothing."""
    numbers = {"select_fixed_us": 7.0, "select_us_per_row": 0.5, "topk_us_per_element": 0.1}
    context, batch = np.array([640.0]), np.array([3])
    assert _model(**numbers).select_us(context, batch).tolist() == pytest.approx([7 + 3 + 4])
    assert _model("infllmv2", **numbers).select_us(context, batch).tolist() == pytest.approx([7 + 3 + 2])
    assert _model("full", **numbers).select_us(context, batch).tolist() == [0.0]


def test_overlap_above_one_is_refused(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(Path(hardware_module.__file__).parent / "profiles" / "ideal", bundle)
    models = json.loads((bundle / "models.json").read_text())
    models["gemm_overlap"]["value"] = 1.5
    (bundle / "models.json").write_text(json.dumps(models))
    with pytest.raises(HardwareError, match=r"gemm_overlap=1\.5 must be <= 1"):
        load_hardware(bundle)
