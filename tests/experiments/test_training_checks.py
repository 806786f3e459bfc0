"""Gradients by finite differences in float64, many queries to a block; and that the check sees wrong ones."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nosa_sys.experiments import gradient_checks, training_checks
from nosa_sys.experiments.gradient_checks import FORM_CASES, difference_rows, form_row, sharing
from nosa_sys.experiments.training_checks import BOUND, main, summary
from nosa_sys.kernels import launch
from nosa_sys.training import model as model_module

HEAD_PARTS = {f"model.layers.{i}.self_attn.{name}" for i in (0, 1) for name in ("A", "delta.weight")}
ATTEND = model_module.attend


@pytest.mark.parametrize(("head", "trained"), [("ed_dma", "all"), ("ed_dma", "low_rank"), ("dma", "head")])
def test_case_29_gradients_by_finite_differences(head: str, trained: str) -> None:
    """Every tensor that learns, q, k, v, gate and up apart; low-rank factors a and b."""
    rows = list(difference_rows("nosa", head, trained))
    names = {row["tensor"] for row in rows}
    assert names >= HEAD_PARTS
    base = {"embedding", "final_norm"} | {f"model.layers.{i}.{name}" for i in (0, 1) for name in (
        *("qkv (q)", "qkv (k)", "qkv (v)", "o", "gate_up (gate)", "gate_up (up)", "down"),
        *("attention_norm", "mlp_norm"),
    )}  # fmt: skip
    factors = {f"model.layers.{i}.low_rank.{name}" for i in (0, 1) for name in (
        *("qkv.a", "qkv.b (q)", "qkv.b (k)", "qkv.b (v)", "o.a", "o.b"),
        *("gate_up.a", "gate_up.b (gate)", "gate_up.b (up)", "down.a", "down.b"),
    )}  # fmt: skip
    assert names - HEAD_PARTS == {"all": base, "low_rank": factors, "head": set()}[trained]
    for row in rows:
        assert row["relative_error"] < BOUND, row


def without_beta(name: str, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, ids: Tensor, size: int) -> Tensor:
    return ATTEND(name, q, k, v, beta.detach(), ids, size)


def with_a_beta_one_thousandth_off(
    name: str, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, ids: Tensor, size: int
) -> Tensor:
    return ATTEND(name, q, k, v, beta + 1e-3 * (beta - beta.detach()), ids, size)


@pytest.mark.parametrize("wrong", [without_beta, with_a_beta_one_thousandth_off])
def test_wrong_gradients_of_the_head_are_seen(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing gradient, or one that is 0.1 % too large, in the last layer's head."""
    monkeypatch.setattr(model_module, "attend", wrong)
    rows = {row["tensor"]: row["relative_error"] for row in difference_rows("nosa", "ed_dma", "all")}
    assert rows["model.layers.1.self_attn.A"] > 50 * BOUND
    assert rows["model.layers.1.self_attn.delta.weight"] > 50 * BOUND
    assert rows["model.layers.1.o"] < BOUND


def test_many_queries_share_a_block() -> None:
    row = sharing("nosa", "ed_dma")
    assert row["n_sparse_queries"] == 70
    assert row["fewest_queries_of_a_block"] >= 20
    assert row["median_queries_of_a_block"] >= 40


@pytest.mark.parametrize("case", FORM_CASES, ids=[case.name for case in FORM_CASES])
def test_form_rows_hold_every_gradient(case: Any) -> None:
    row = form_row("sdpa", case, torch.device("cpu"))
    assert set(row["errors"]) == {"output", "q", "k", "v"} | ({"beta"} if case.mean is not None else set())
    assert max(row["errors"].values()) < 2e-5
    assert min(row["errors"].values()) > 0


def test_a_missed_bound_is_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(error: float) -> list[dict[str, Any]]:
        return [{"part": "difference", "relative_error": value} for value in (1e-9, error, 1e-8)]

    for error, status in ((2e-7, 0), (1e-4, 1), (math.nan, 1)):
        monkeypatch.setattr(training_checks, "check_rows", lambda device, error=error: rows(error))
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # main sets it: put back afterwards
        assert main(["--out", str(tmp_path)]) == status
        document = json.loads((tmp_path / "checks.json").read_text())
        assert [line["met"] for line in document["summary"]] == [status == 0]
    assert main(["--out", str(tmp_path), "--device", "tpu"]) == 2


def test_without_triton_its_forms_are_left_out_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not installed, though the environment asks for its interpreter; the other rows stay."""
    monkeypatch.setattr(launch, "has_triton", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(training_checks, "difference_rows", lambda *model: [])
    monkeypatch.setattr(gradient_checks, "FORM_CASES", FORM_CASES[:1])
    for name in ("resumed_row", "frozen_row"):
        monkeypatch.setattr(training_checks, name, lambda *of: {"part": "none"})
    assert main(["--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "checks.json").read_text())
    (note,) = document["notes"]
    assert note.startswith("without the Triton kernels: triton is not installed; pip install")
    found = {part: [row["form"] for row in document["rows"] if row["part"] == part] for part in ("form", "model form")}
    assert found == {"form": ["sdpa", "flex"], "model form": ["sdpa"] * 4}


@pytest.mark.parametrize("module", ["training_checks", "head_numerics", "kernel_limits"])
def test_a_gpu_without_triton_is_one_line(module: str, tmp_path: Path) -> None:
    """A process of its own, in which torch claims a GPU and triton cannot be imported."""
    claim = (
        "import runpy, sys, torch; sys.modules['triton'] = None; torch.cuda.is_available = lambda: True; "
        f"torch.cuda.device_count = lambda: 1; runpy.run_module('nosa_sys.experiments.{module}', run_name='__main__')"
    )
    arguments = ["--out", str(tmp_path / "out"), *([] if module == "kernel_limits" else ["--device", "cuda"])]
    done = subprocess.run([sys.executable, "-c", claim, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("triton is not installed; pip install -e '.[gpu]'")
    assert not (tmp_path / "out").exists()


def test_the_summary_names_what_differs() -> None:
    resumed = {"part": "resumed", "n_tensors_different": 0, "n_log_rows_different": 1, "same_state": False}
    missed = {line["what"] for line in summary([resumed]) if not line["met"]}
    assert missed == {"log rows of a resumed run that differ", "resumed runs that read elsewhere"}
