"""The slot plan's kernel through Triton's interpreter against the dictionary model; started by test_slot_plan.py.

    python -m tests.kernels.interpreter.run_slot_plan

TRITON_INTERPRET has to be set before any kernel module is imported, hence a process of its own.
"""

import functools
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from nosa_sys.kernels.set_difference.plan import plan_slots
from tests.kernels.slot_plan_model import SIZES, check_history


def main() -> int:
    torch.set_num_threads(1)
    wasted = [check_history(sizes, seed, 6, plan_slots, row_major=False) for seed, sizes in enumerate(SIZES)]
    assert wasted[0] > 0, "no prefetched block was wasted: the count was not tried"
    # Parts of 4 x 4 pairs: the chunked path, with what its chunks share in scratch.
    check_history(SIZES[0], 7, 4, functools.partial(plan_slots, tile_elements=32), row_major=False)
    print("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
