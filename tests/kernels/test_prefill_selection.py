"""Selection of many queries at once: the kernels in Triton's interpreter against plain loops, at any first position."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

RUNNER = Path(__file__).parent / "interpreter" / "run_prefill_selection.py"


def test_many_queries_select_what_plain_loops_select() -> None:
    """Every block of every query, in one piece, a few queries at a time, and as two chunks of a prompt; a NaN query is
    reported at its position and head, with the first block that it could not rank; windows that lack are refused."""
    done = subprocess.run(
        [sys.executable, str(RUNNER)], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    *cases, reports, lacking = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == 8
    for case in cases:
        assert case["different"] == 0, case
        assert case["same"], case
        assert case["same_chunks"], case
    assert [case["checked"] for case in cases] == [[n, -1, -1] for n in (5, 5, 6, 5, 5, 1, 5)] + [None]
    assert reports == [[[65, 0, 1]], [[75, 0, 1]], [[146, 0, 1]]]
    assert lacking == (
        "CapacityError: 4 key means and 12 beta means do not cover the 80 tokens of context; give all 9 windows"
    )
