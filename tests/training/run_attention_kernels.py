"""Run the training attention's kernels through Triton's interpreter; started by test_attention_triton.py.

TRITON_INTERPRET has to be set before any kernel module is imported, hence a process of its own. Prints a line of JSON a
case: the relative errors of the output and of every gradient against the form that runs on any CPU, in float64.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from nosa_sys.methods import get_method
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.training.attention import attend, select

TINY = SparseConfig(16, 16, 8, topk=4, init_blocks=1, window_size=16, select_blocks=1)
WIDE = SparseConfig(64, 32, 16, topk=3, init_blocks=0, window_size=64, select_blocks=2)
UNEVEN = SparseConfig(48, 16, 8, topk=3, init_blocks=0, window_size=48, select_blocks=2)
# name, tokens, query heads, KV heads, channels, budgets, method, mean of the betas (None: none)
CASES = (
    ("nosa", 100, 3, 1, 16, TINY, "nosa", 0),
    ("two-kv-heads", 81, 4, 2, 8, TINY, "nosa", 0),
    ("infllmv2", 96, 2, 1, 16, TINY, "infllmv2", None),
    ("dma", 75, 2, 1, 24, TINY, "dma", 0),
    ("blocks-of-64", 210, 2, 1, 16, WIDE, "nosa", 0),
    ("blocks-of-48", 170, 2, 1, 16, UNEVEN, "nosa", 0),
    ("dense-biased", 75, 4, 2, 16, TINY, "full", 0),
    ("short", 5, 2, 1, 16, TINY, "nosa", 0),
    ("large-betas", 70, 2, 1, 8, TINY, "nosa", 100),  # exp of them overflows fp32
    ("dense-large-betas", 38, 2, 1, 8, TINY, "full", 100),
)


def errors(name, n_tokens, n_q_heads, n_kv_heads, dim, cfg, method, mean):
    rng = torch.Generator().manual_seed(len(name) + n_tokens)
    sizes = [(n_tokens, n_q_heads, dim), (n_tokens, n_kv_heads, dim), (n_tokens, n_kv_heads, dim)]
    whole = [torch.randn(size, generator=rng) for size in sizes] + [
        (mean or 0) + 2 * torch.randn(n_tokens, n_kv_heads, generator=rng)
    ]
    selected = select(whole[0], whole[1], whole[3], cfg, get_method(method))
    ids = None if selected is None else selected.block_ids
    slope = torch.randn(sizes[0], generator=rng)
    results = []
    for way, dtype in (("sdpa", torch.float64), ("triton", torch.float32)):
        leaves = [x.to(dtype).requires_grad_() for x in whole]
        out = attend(way, *leaves[:3], leaves[3] if mean is not None else None, ids, cfg.block_size)
        (out * slope).sum().backward()
        results.append([out.detach(), *(x.grad for x in (leaves if mean is not None else leaves[:3]))])
    return [float((got.double() - right).norm() / right.norm()) for right, got in zip(*results, strict=True)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in CASES:
        print(json.dumps({"case": case[0], "errors": errors(*case)}), flush=True)
