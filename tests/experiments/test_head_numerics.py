"""Numerics of eviction heads: counts by closed forms, cores by sorting, masses by the evaluation's own, the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nosa_sys.errors import ConfigError
from nosa_sys.experiments import head_grid
from nosa_sys.experiments.head_grid import SCALES, count_tied, grid_rows
from nosa_sys.experiments.head_numerics import N_QUERIES, count_not_finite, document_rows, main
from nosa_sys.experiments.head_precision import cores, kept_means, precision_rows, see_document
from nosa_sys.kernels import launch
from nosa_sys.kernels.eviction_head.reference import MAX_EXPONENT
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.training.scoring import score_document
from tests.training.small import SPARSE, tiny, tokens

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def grid() -> list[dict[str, Any]]:
    return list(grid_rows(CPU))


def row_of(rows: list[dict[str, Any]], **where: Any) -> dict[str, Any]:
    (found,) = [row for row in rows if all(row[name] == value for name, value in where.items())]
    return found


# ---- extreme inputs
def test_everything_is_finite_for_every_type_head_and_scale(grid: list[dict[str, Any]]) -> None:
    assert len(grid) == 2 * 2 * len(SCALES)
    assert count_not_finite(grid) == 0
    counted = {name for row in grid for name in row if name.endswith("_not_finite")}
    assert counted == {"n_not_finite", "n_means_not_finite", "n_attention_not_finite", "n_gradients_not_finite"}
    assert max(row["relative_error"] for row in grid if row["head"] == "ed_dma") < 1e-6


def test_overflows_of_the_plain_exponential_by_closed_form(grid: list[dict[str, Any]]) -> None:
    """exp overflows float32 from 88.73 on: of whole inputs 89 .. 1000 at A = 1, 9 .. 1000 at A = 10."""
    for scale, first in ((1.0, 89), (10.0, 9)):
        row = row_of(grid, head="dma", dtype="float32", A=scale)
        assert row["n_exp_overflows"] == 1000 - first + 1
        assert row["largest"] == pytest.approx(np.exp(MAX_EXPONENT))
    assert row_of(grid, head="dma", dtype="float32", A=0.01)["n_exp_overflows"] == 0


def test_ties_by_closed_form(grid: list[dict[str, Any]]) -> None:
    """DMA at A = 10: everything from 8 on is at the limit, everything that rounds to 1 below; ED-DMA ties where the
    exponential inside softplus underflows alone, below -103, whatever A is."""
    dma = row_of(grid, head="dma", dtype="float32", A=10.0)
    ed_dma = row_of(grid, head="ed_dma", dtype="float32", A=10.0)
    rounded = sum(np.float32(np.exp(10 * np.log1p(np.exp(np.float64(x))))) == 1 for x in range(-1000, 0))
    assert dma["n_tied"] == 993 + rounded
    assert ed_dma["n_tied"] == 1000 - 103 + 1
    assert dma["n_pooled_tied"] > dma["n_pooled_tied_exact"] == ed_dma["n_pooled_tied"]


def test_a_softplus_that_overflows_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def naive(v: Tensor, A: Tensor, delta: Tensor, head: str) -> Tensor:
        return A * torch.log(1 + torch.exp(v.float() @ delta.T))

    monkeypatch.setattr(head_grid, "implementations", lambda device: {"reference": naive})
    rows = [row for row in grid_rows(CPU) if row["head"] == "ed_dma"]
    assert min(row["n_not_finite"] for row in rows) > 50
    assert min(row["n_means_not_finite"] for row in rows) > 0
    assert max(row["n_attention_not_finite"] for row in rows) > 0


def test_tied_values_are_counted_with_their_first() -> None:
    assert count_tied(torch.tensor([3.0, 1.0, 3.0, 2.0, 3.0, 2.0])) == 5
    assert count_tied(torch.tensor([1.0, 2.0])) == 0


# ---- a trained head
@pytest.mark.parametrize("values", [3, 1000])
def test_cores_are_the_first_of_a_stable_sort(values: int) -> None:
    """Of few values, so that ties decide, and of many."""
    cfg = SparseConfig(16, 16, 8, topk=8, init_blocks=1, window_size=32, select_blocks=2)
    pooled = torch.randint(0, values, (3, 20), generator=torch.Generator().manual_seed(values)).double()
    got = cores(pooled, [9, 15, 20], cfg)
    n_core = 8 - 4 - 1  # k, less sink + 2 local + current, less the one query-aware pick
    for row, n_blocks in enumerate((9, 15, 20)):
        for head in range(3):
            order = sorted(range(1, n_blocks - 3), key=lambda j: (-float(pooled[head, j]), j))
            assert got[row, head].nonzero().flatten().tolist() == sorted(order[:n_core])


def test_scores_and_means_are_rounded_to_the_type_that_keeps_them() -> None:
    """In bfloat16, 1.001 is 1; a mean of half 1 and half 1.0078125 is neither, and rounds to the even one, 1."""
    cfg = SparseConfig(16, 16, 8, topk=5, init_blocks=1, window_size=16, select_blocks=2)
    scores = torch.full((16, 1), 1.001)
    assert kept_means(scores, torch.bfloat16, cfg).tolist() == [[1.0]]
    assert kept_means(scores, torch.float32, cfg).tolist() == [[pytest.approx(1.001)]]
    scores = torch.tensor([[1.0], [1.0078125]]).repeat(8, 1)
    assert kept_means(scores, torch.bfloat16, cfg).tolist() == [[1.0]]
    assert kept_means(scores, torch.float32, cfg).tolist() == [[1.00390625]]


def test_precision_of_a_model_whose_betas_are_close() -> None:
    """A of 1e-3 on top of bfloat16's 8 bits: all exponentials round to the same few values, so cores fall back to the
    lowest indices; float32 keeps the order."""
    model, ids = tiny(), tokens(300).tolist()
    for layer in model.layers:
        layer.A.fill_(1e-3)
    with torch.no_grad():
        rows = list(precision_rows(model, see_document(model, ids, SPARSE, []), SPARSE))
    assert {(row["head"], row["kept"]) for row in rows} == {
        (head, kept) for head in ("ed_dma", "dma") for kept in ("float64", "float32", "bfloat16", "float16")
    }
    for row in rows:
        assert (row["n_heads"], row["n_contexts"]) == (4, 4 * (19 - 5))
        assert row["n_pooled"] == 4 * (19 - 3)
        if row["kept"] == "float64":
            assert row["n_contexts_changed"] == 0
    assert row_of(rows, head="dma", kept="bfloat16")["n_pooled_tied"] == 4 * 16
    assert row_of(rows, head="dma", kept="bfloat16")["n_cores_changed"] > 0
    assert row_of(rows, head="ed_dma", kept="float32")["n_cores_changed"] == 0


def test_masses_are_those_of_the_evaluation() -> None:
    """Under ED-DMA the plain mass inside the selection is ``score_document``'s dense mass at the same positions."""
    model, ids = tiny("float64"), tokens(200).tolist()
    rows = document_rows(model, ids, SPARSE)
    expected = score_document(model, ids, SPARSE, mass_positions=N_QUERIES).dense_mass
    assert row_of(rows, part="attention", head="ed_dma")["plain_mass_kept"] == pytest.approx(expected, rel=1e-5)
    none, ed_dma, dma = (row_of(rows, part="attention", head=head) for head in ("none", "ed_dma", "dma"))
    assert none["shared_with_plain"] == pytest.approx(1)
    assert none["n_queries"] == N_QUERIES * 2 * 4
    assert 0 < dma["shared_with_plain"] < 1
    assert dma["entropy_nats"] != ed_dma["entropy_nats"]
    with pytest.raises(ConfigError, match="90 tokens are all within k = 5 blocks; give 96"):
        document_rows(model, ids[:90], SPARSE)


def test_without_triton_the_reference_is_counted_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not installed, though the environment asks for its interpreter."""
    monkeypatch.setattr(launch, "has_triton", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["--out", str(tmp_path), "--tokens", "0"]) == 0
    document = json.loads((tmp_path / "numerics.json").read_text())
    assert {row["implementation"] for row in document["rows"]} == {"reference"}
    (note,) = document["notes"]
    assert note.startswith("without the Triton kernel: triton is not installed; pip install")


def test_the_command_counts_the_kernel_too(tmp_path: Path) -> None:
    """In a process of its own: the interpreter is chosen before kernels are imported."""
    command = [sys.executable, "-m", "nosa_sys.experiments.head_numerics", "--out", str(tmp_path), "--tokens", "0"]
    pytest.importorskip("triton")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "numerics.json").read_text())
    rows = document["rows"]
    assert {row["implementation"] for row in rows} == {"reference", "triton"}
    assert count_not_finite(rows) == 0
    assert document["status"] == "measured"
    assert document["facts"]["versions"]["triton"]
    kernel = [row for row in rows if row["implementation"] == "triton" and row["head"] == "ed_dma"]
    assert max(row["relative_error"] for row in kernel) < 1e-6
