"""Run the training attention's kernels through Triton's interpreter; started by test_attention_triton.py.

TRITON_INTERPRET has to be set before any kernel module is imported, hence a process of its own. Prints a line of JSON a
case: the relative errors of the output and of every gradient against the form that runs on any CPU, in float64.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from nosa_sys.kernels.compressed_keys.reference import window_means
from nosa_sys.kernels.prefill_attention.reference import prefill_selection
from nosa_sys.methods import get_method
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.training import selection_triton
from nosa_sys.training.attention import attend, select
from nosa_sys.training.selection_triton import select_causal

TINY = SparseConfig(16, 16, 8, topk=4, init_blocks=1, window_size=16, select_blocks=1)
WIDE = SparseConfig(64, 32, 16, topk=3, init_blocks=0, window_size=64, select_blocks=2)
UNEVEN = SparseConfig(48, 16, 8, topk=3, init_blocks=0, window_size=48, select_blocks=2)
FINE = SparseConfig(48, 8, 4, topk=3, init_blocks=0, window_size=48, select_blocks=2)
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


def different_picks(n_tokens, n_q_heads, n_kv_heads, dim, cfg, method):
    """Picks of the tiled selection that the reference does not have, and NaN reports."""
    rng = torch.Generator().manual_seed(n_tokens)
    q = torch.randn(n_tokens, n_q_heads, dim, generator=rng)
    k = torch.randn(n_tokens, n_kv_heads, dim, generator=rng)
    beta = torch.randn(n_tokens, n_kv_heads, generator=rng)
    key_means = window_means(k, cfg.kernel_size, cfg.kernel_stride).transpose(0, 1).contiguous()
    beta_means = window_means(beta, cfg.kernel_size, cfg.kernel_stride).T.contiguous()
    rule = get_method(method)
    right = prefill_selection(q, key_means, beta_means, 0, cfg, rule).block_ids
    got, reports = select_causal(q, key_means, beta_means, cfg, rule)
    return {"sparse": len(reports), "different": int((right != got).sum()), "reports": int((reports >= 0).sum())}


def reported(cfg):
    """[query, KV head] of the reports of NaN where one query of one head is NaN."""
    rng = torch.Generator().manual_seed(0)
    q, key_means = torch.randn(93, 4, 8, generator=rng), torch.randn(2, cfg.n_windows(93), 8, generator=rng)
    q[90, 1] = float("nan")
    _, reports = select_causal(q, key_means, torch.zeros(2, key_means.shape[1]), cfg, get_method("infllmv2"))
    return [[int(row) + 93 - len(reports), int(head)] for row, head in (reports >= 0).nonzero()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in CASES:
        print(json.dumps({"case": case[0], "errors": errors(*case)}), flush=True)
    # few tokens past the budget, tiles of 8 queries or so; FINE: more windows than the 32 of a tile
    sizes = ((83, 6, 2, 16, TINY, "nosa"), (165, 4, 1, 16, FINE, "nosa"), (110, 3, 1, 8, TINY, "infllmv2"))
    for bound, chosen in ((2**28, sizes), (700, sizes[2:])):  # all queries at once, and a few
        selection_triton._SCORE_BYTES = bound
        for size in chosen:
            print(json.dumps({"case": "selection", **different_picks(*size)}), flush=True)
    print(json.dumps({"case": "nan", "reported": reported(TINY)}))
