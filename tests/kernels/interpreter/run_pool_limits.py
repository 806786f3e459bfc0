"""Pools of more than 2^31 elements and rows outside a pool, through Triton's interpreter.

    python run_pool_limits.py past-2^31
    python run_pool_limits.py outside

Started by test_interpreter.py: TRITON_INTERPRET has to be set first, hence a process of its own.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from nosa_sys.kernels.block_fetch.triton import copy_runs
from nosa_sys.kernels.sparse_decode_attention.triton import sparse_decode_attention

BLOCK, DIM = 64, 128
N_ROWS = 2**31 // (2 * BLOCK * DIM) + 128
# The last row that starts below 2^31 elements, the first one past it, and both ends.
ROWS = (0, 131_071, 131_072, N_ROWS - 1)


def past_2_31_elements() -> None:
    """Each row gives its own constant; only the rows that are written take real memory."""
    try:
        pool = torch.empty((N_ROWS, 2, BLOCK, DIM), dtype=torch.bfloat16)
    except RuntimeError:
        print("SKIP: this machine grants no 4.3 GB of address space")
        return
    for row in ROWS:
        pool[row] = 1.0 + ROWS.index(row)
    rows, slots = torch.tensor(ROWS), torch.zeros((len(ROWS), 2, BLOCK, DIM), dtype=torch.bfloat16)
    copy_runs(pool, slots, rows, torch.arange(len(ROWS)))
    for i in range(len(ROWS)):
        assert (slots[i] == i + 1).all(), f"row {ROWS[i]} came back as {slots[i].unique().tolist()}"
    copy_runs(slots, pool, torch.tensor([0]), torch.tensor([N_ROWS - 2]))
    assert (pool[N_ROWS - 2] == 1).all(), "write-back past 2^31 elements"
    q = torch.ones((len(ROWS), 2, DIM), dtype=torch.bfloat16)
    ids = torch.zeros((len(ROWS), 1, 1), dtype=torch.int32)
    out, _ = sparse_decode_attention(q, pool, None, rows.view(-1, 1, 1), ids, torch.full((len(ROWS),), BLOCK))
    for i in range(len(ROWS)):
        assert (out[i] == i + 1).all(), f"attention over row {ROWS[i]} gave {out[i].unique().tolist()}"


def outside() -> None:
    """Pairs with a row outside its pool are skipped; both pools lie inside larger memory, which stays untouched."""
    source_memory = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 2, 4, 8).contiguous()
    target_memory = torch.full((6, 2, 4, 8), 777.0)
    copy_runs(
        source_memory[1:4],
        target_memory[1:4],
        torch.tensor([0, 3, -1, -2, 1, 1, 1, 2]),
        torch.tensor([2, 0, 0, 0, 3, -1, -2, 1]),
    )
    assert target_memory[:, 0, 0, 0].tolist() == [777.0, 777.0, 3.0, 1.0, 777.0, 777.0]


def main(check: str) -> int:
    torch.set_num_threads(1)
    {"past-2^31": past_2_31_elements, "outside": outside}[check]()
    print("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
