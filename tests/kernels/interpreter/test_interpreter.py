"""Every operation's small cases, Triton kernel in the CPU interpreter against the reference."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from nosa_sys.kernels.registry import OPERATION_MODULES

RUNNER = Path(__file__).with_name("run_small_cases.py")
POOL_LIMITS = Path(__file__).with_name("run_pool_limits.py")
# No Triton kernels: the bulk copy engine and the driver's batched copy.
NEED_A_GPU = {"block_fetch": ("bulk_fetch", "dma_fetch")}


@pytest.mark.parametrize("operation", OPERATION_MODULES)
def test_small_cases_in_the_interpreter(operation: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(RUNNER), operation, *NEED_A_GPU.get(operation, ())]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def run_pool_check(name: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(POOL_LIMITS), name], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    if done.stdout.startswith("SKIP"):
        pytest.skip(done.stdout)


def test_case_12_offsets_past_2_31_elements() -> None:
    """Fetch, write-back and attention on a pool of 4.3 GB reach each row's own constant on both sides of 2^31."""
    run_pool_check("past-2^31")


def test_case_18_rows_outside_a_pool_are_skipped() -> None:
    run_pool_check("outside")
