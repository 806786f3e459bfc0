"""Slot plans against a dictionary model: the reference here, the kernel in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys.errors import CapacityError, ConfigError
from nosa_sys.kernels.set_difference import LoadList, SlotPlan, TokenRows, plan_slots
from tests.kernels.slot_plan_model import SIZES, Sizes, check_history

ROOT = Path(__file__).resolve().parents[2]


@given(sizes=st.sampled_from(SIZES), seed=st.integers(0, 2**32))
def test_histories_equal_a_dictionary_model(sizes: Sizes, seed: int) -> None:
    check_history(sizes, seed, 8, plan_slots, row_major=True)


def test_the_kernel_equals_the_dictionary_model() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.kernels.interpreter.run_slot_plan"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def _token(rows: int = 1, heads: int = 1, dim: int = 4, slots: int = 4) -> TokenRows:
    x = torch.zeros(rows, heads, dim)
    return TokenRows(x, x, x[..., 0], torch.zeros(rows).long(), torch.zeros(slots, 2, 3, 4), None)


def _plan(wanted: list[int], slots: int = 4, **options: object) -> SlotPlan:
    loads = LoadList(torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64), torch.zeros(1).int())
    given: dict[str, object] = {"page_table": torch.arange(20).view(1, 20)} | options
    return plan_slots(
        torch.full((1, slots), -1, dtype=torch.int32),
        torch.tensor([wanted], dtype=torch.int32),
        given.pop("ranks", torch.zeros(1, slots, dtype=torch.int64)),  # type: ignore[arg-type]
        bool(given.pop("keep", True)),
        given.pop("loads", loads),  # type: ignore[arg-type]
        **given,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("error", "message", "wanted", "options"),
    [
        (CapacityError, "2 misses, more than split=1; give split up to 3", [4, 5, -1], {"split": 1}),
        (CapacityError, "3 slots cannot hold 4 wanted", [1, 2, 3, 4], {"slots": 3}),
        (ConfigError, r"split=4 must lie in 1\.\.3", [1, 2, 3], {"split": 4}),
        (ConfigError, r"split=0 must lie in 1\.\.3", [1, 2, 3], {"split": 0}),
        (ConfigError, "touch='all'", [1], {"touch": "all"}),
        (ConfigError, "either page_table or host_row_base", [1], {"page_table": None}),
        (ConfigError, "float32, keep_unwanted=True", [1], {"count_wasted": True, "ranks": torch.zeros(1, 4)}),
        (ConfigError, "keep_unwanted=False", [1], {"count_wasted": True, "keep": False}),
        (ConfigError, r"k \(2, 1, 4\) and .* do not fit 1 rows", [1], {"token": _token(rows=2)}),
        (ConfigError, "1 KV heads each", [1], {"token": _token(heads=2)}),
        (ConfigError, "head_dim 4", [1], {"token": _token(dim=6)}),
        (ConfigError, "side by side", [1], {"token": _token()._replace(k=torch.zeros(1, 1, 8)[..., ::2])}),
        (ConfigError, "use_step ranks", [1], {"use_step": torch.tensor([1]), "keep": False}),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(
    error: type[Exception], message: str, wanted: list[int], options: dict[str, object]
) -> None:
    with pytest.raises(error, match=message):
        _plan(wanted, **options)  # type: ignore[arg-type]


def test_a_list_that_is_full_is_refused() -> None:
    rows = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(CapacityError, match="list of 3 cannot hold 1 x 4"):
        _plan([1, 2, 3, 4], loads=LoadList(rows, rows, torch.zeros(1).int()))
    with pytest.raises(CapacityError, match="2 loads after 2 exceed the list of 3"):
        _plan([1, 2], loads=LoadList(rows, rows, torch.tensor([2], dtype=torch.int32)))


@pytest.mark.parametrize(("name", "seed"), [("token-exact", 1), ("token-without-beta", 2), ("token-kv-alone", 3)])
def test_the_reference_writes_the_token_too(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the row by row plan of the cases; the kernel's own test is the interpreter's."""
    pytest.importorskip("triton")
    from nosa_sys.kernels.set_difference import cases, plan

    monkeypatch.setattr(plan, "plan_slots", plan_slots)
    case = next(c for c in cases.PLAN.cases() if c.name == name)
    inputs = cases.PLAN.make_inputs(case, torch.device("cpu"), torch.Generator().manual_seed(seed))
    expected = cases.PLAN.reference(inputs)
    errors = cases.PLAN.compare(case, inputs, cases.PLAN.fast(inputs), expected)
    assert all(error <= limit for error, limit in errors.values()), errors
    n_written = int((~expected["kv_slots"].isnan()).any(-1).all(1).sum())
    assert n_written == int((expected["current_rows"] >= 0).sum()) > 0


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_an_unknown_page_is_skipped_in_every_head(heads: int) -> None:
    """-1 * heads + head is -1 for the last head alone: each head has to list -1 itself."""
    loads = LoadList(torch.full((heads,), 777), torch.full((heads,), 777), torch.zeros(1).int())
    plan_slots(
        torch.full((heads, 2), -1, dtype=torch.int32),
        torch.full((heads, 1), 1, dtype=torch.int32),
        torch.zeros(heads, 2, dtype=torch.int64),
        True,
        loads,
        page_table=torch.tensor([[5, -1]]),
        n_kv_heads=heads,
    )
    assert loads.host_rows.tolist() == [-1] * heads
    assert loads.slot_rows.tolist() == [2 * head for head in range(heads)]
