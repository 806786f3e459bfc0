"""Selection of many queries at once through Triton's interpreter, started by test_prefill_selection.py.

TRITON_INTERPRET has to be set before any kernel module is imported, hence a process of its own. Prints a line of JSON a
case. What is right comes from plain loops in float64 over one query and one window at a time.
"""

import json
import math
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from nosa_sys.kernels.prefill_attention.selection import queue_selection
from nosa_sys.methods import get_method
from nosa_sys.sparse_config import SparseConfig

TINY = SparseConfig(16, 16, 8, topk=4, init_blocks=1, window_size=16, select_blocks=1)
FINE = SparseConfig(48, 8, 4, topk=3, init_blocks=0, window_size=48, select_blocks=2)  # more windows than a tile's 32
WIDE = SparseConfig(64, 32, 16, topk=4, init_blocks=1, window_size=64, select_blocks=2)
# first position, tokens, query heads, KV heads, channels, budgets, method, type of q, type of the key means
CASES = (
    (59, 10, 2, 1, 16, TINY, "nosa", "float32", "float32"),  # from dense to sparse queries
    (70, 5, 9, 3, 16, TINY, "nosa", "float32", "float32"),
    (150, 6, 4, 1, 16, FINE, "nosa", "float32", "float32"),
    (301, 5, 32, 2, 16, WIDE, "nosa", "bfloat16", "float32"),
    (301, 5, 3, 1, 24, WIDE, "infllmv2", "bfloat16", "bfloat16"),
    (97, 1, 3, 1, 8, TINY, "infllmv2", "float16", "float32"),
    (97, 5, 3, 1, 8, TINY, "dma", "float32", "float32"),
    (20, 30, 3, 1, 8, TINY, "nosa", "float32", "float32"),  # at most k blocks throughout
)


def right_blocks(q, key_means, beta_means, position, cfg, method, n_query_aware):
    """One query of one KV head, q [group, D]: the blocks that the rule of the paper selects."""
    n_blocks, ratio = position // cfg.block_size + 1, cfg.block_size // cfg.kernel_stride
    if n_blocks <= cfg.topk:
        return list(range(n_blocks))
    n_windows = (position + 1 - cfg.kernel_size) // cfg.kernel_stride + 1
    scores = [0.0] * n_windows
    for row in q.double():
        logits = [float(row @ key_means[i].double()) / math.sqrt(len(row)) for i in range(n_windows)]
        top = max(logits)
        total = sum(math.exp(x - top) for x in logits)
        scores = [score + math.exp(x - top) / total for score, x in zip(scores, logits, strict=True)]

    def pooled(values, block):
        inside = range(max(0, ratio * block - 1), min(n_windows, ratio * block + ratio))
        return max((float(values[i]) for i in inside), default=-math.inf)

    forced = {*range(cfg.init_blocks), *range(n_blocks - 1 - cfg.local_blocks, n_blocks)}
    chosen = set(forced)
    for values, size in ((scores, len(forced) + n_query_aware), (beta_means, cfg.topk)):
        rest = sorted(set(range(n_blocks)) - chosen, key=lambda block: (-pooled(values, block), block))
        chosen |= set(rest[: size - len(chosen)])
    return sorted(chosen)


def inputs(first, n_tokens, n_q_heads, n_kv_heads, dim, cfg, method, q_dtype, means_dtype):
    """Arguments of the selection; the means are slices of larger buffers, NaN beyond the last complete window."""
    rng = torch.Generator().manual_seed(first + n_tokens)
    n_windows = cfg.n_windows(first + n_tokens)
    q = (2 * torch.randn(n_tokens, n_q_heads, dim, generator=rng)).to(getattr(torch, q_dtype))
    buffers = (
        torch.full((2, n_kv_heads, n_windows + 9, dim), math.nan),
        torch.full((2, n_kv_heads, n_windows + 9), math.nan),
    )
    for buffer in buffers:
        buffer[1, :, :n_windows] = torch.randn(buffer[1, :, :n_windows].shape, generator=rng)
    key_means = buffers[0].to(getattr(torch, means_dtype))[1, :, : n_windows + 3]
    return q, key_means, buffers[1][1, :, : n_windows + 3], first, cfg, get_method(method)


def four_queries(key_means, n_tokens, cfg):
    """Bytes of the scores of four queries."""
    return 16 * len(key_means) * cfg.n_windows(n_tokens)


def outcome(case):
    q, key_means, beta_means, first, cfg, method = given = inputs(*case)
    whole, errors = queue_selection(*given)
    n_query_aware = method.query_aware_picks(cfg, cfg.n_forced)
    different = 0
    heads = q.unflatten(1, (len(key_means), -1))
    for t in range(len(q)):
        for head in range(len(key_means)):
            right = right_blocks(
                heads[t, head], key_means[head], beta_means[head], first + t, cfg, method, n_query_aware
            )
            padded = right + [-1] * (cfg.topk - len(right))
            different += whole.block_ids[t, head].tolist() != padded or int(whole.counts[t]) != len(right)
    few, few_errors = queue_selection(*given, score_bytes=four_queries(key_means, first + len(q), cfg))
    same = all(torch.equal(a, b) for a, b in zip(whole, few, strict=True))
    split = len(q) // 2  # as two chunks of a prompt
    chunks = [
        queue_selection(q[:split], key_means, beta_means, first, cfg, method)[0],
        queue_selection(q[split:], key_means, beta_means, first + split, cfg, method)[0],
    ]
    joined = [torch.cat(parts) for parts in zip(*chunks, strict=True)]
    same_chunks = all(torch.equal(a, b) for a, b in zip(whole, joined, strict=True))
    checked = None if errors is None else [len(errors), int(errors.max()), int(few_errors.max())]
    return {"different": different, "same": same, "same_chunks": same_chunks, "checked": checked}


def reported(first):
    """[position, KV head, block] of the reports of NaN where one query of one head is NaN, in chunks of queries."""
    q, key_means, beta_means, first, cfg, method = inputs(first, 7, 4, 2, 8, TINY, "infllmv2", "float32", "float32")
    q[5, 1] = math.nan
    score_bytes = four_queries(key_means, first + len(q), cfg)
    _, errors = queue_selection(q, key_means, beta_means, first, cfg, method, score_bytes=score_bytes)
    first += len(q) - len(errors)
    return [[first + int(row), int(head), int(errors[row, head])] for row, head in (errors >= 0).nonzero()]


def lacking():
    q, key_means, beta_means, first, cfg, method = inputs(70, 10, 2, 1, 8, TINY, "nosa", "float32", "float32")
    try:
        queue_selection(q, key_means[:, :4], beta_means, first, cfg, method)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in CASES:
        print(json.dumps(outcome(case)), flush=True)
    print(json.dumps([reported(60), reported(70), reported(141)]))
    print(json.dumps(lacking()))
