"""Every operation's small cases, Triton kernel in the CPU interpreter against the reference."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from nosa_sys.kernels.registry import OPERATION_MODULES

RUNNER = Path(__file__).with_name("run_small_cases.py")
LARGE_POOLS = Path(__file__).with_name("run_large_pools.py")
# No Triton kernels: the bulk copy engine and the driver's batched copy.
NEED_A_GPU = {"block_fetch": ("bulk_fetch", "dma_fetch")}


@pytest.mark.parametrize("operation", OPERATION_MODULES)
def test_small_cases_in_the_interpreter(operation: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(RUNNER), operation, *NEED_A_GPU.get(operation, ())]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_case_12_offsets_past_2_31_elements() -> None:
    """Fetch, write-back and attention on a pool of 4.3 GB reach each row's own constant on both sides of 2^31."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(LARGE_POOLS)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    if done.stdout.startswith("SKIP"):
        pytest.skip(done.stdout)
    assert "passed" in done.stdout
