"""Prefill's kernels at blocks of one token through Triton's interpreter, started by test_token_blocks.py.

TRITON_INTERPRET has to be set before any kernel module is imported, hence a process of its own. Prints a line of JSON a
method: how many ids and origins differ from the reference's, and the largest error of attention over them.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from nosa_sys.kernels.compressed_keys.reference import window_means
from nosa_sys.kernels.prefill_attention import reference
from nosa_sys.kernels.prefill_attention.selection import prefill_selection
from nosa_sys.kernels.prefill_attention.triton import prefill_attention
from nosa_sys.methods import get_method
from nosa_sys.sparse_config import SparseConfig

CFG = SparseConfig(1, 2, 1, topk=24, init_blocks=2, window_size=8, select_blocks=6)
FIRST, TOKENS = 19, 10  # from dense to sparse queries

if __name__ == "__main__":
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    end = FIRST + TOKENS
    q = 2 * torch.randn(TOKENS, 6, 16, generator=rng)
    k, v, beta = (torch.randn(end, 2, *size, generator=rng) for size in ((16,), (16,), ()))
    key_means = window_means(k, 2, 1).transpose(0, 1).contiguous()
    beta_means = window_means(beta, 2, 1).T.contiguous()
    for name in ("nosa", "infllmv2", "dma"):
        given = (q, key_means, beta_means, FIRST, CFG, get_method(name))
        found, right = prefill_selection(*given), reference.prefill_selection(*given)
        different = [int((a != b).sum()) for a, b in zip(found, right, strict=True)]
        out, expected = (attend(q, k, v, beta, right.block_ids, FIRST, 1) for attend in (
            prefill_attention, reference.prefill_attention
        ))  # fmt: skip
        print(json.dumps([different, float((out - expected).abs().max())]), flush=True)
