"""Dense paged decode against plain float64 attention over the blocks that have a page."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys.kernels.paged_decode_attention import paged_decode_attention

BLOCK, DIM = 4, 5


@given(
    n_kv=st.integers(1, 3),
    group=st.integers(1, 2),
    lengths=st.lists(st.integers(0, 14), min_size=1, max_size=3),
    holes=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 3))),
    seed=st.integers(0, 9),
)
def test_equals_attention_over_the_blocks_that_have_a_page(
    n_kv: int, group: int, lengths: list[int], holes: set[tuple[int, int]], seed: int
) -> None:
    """Unknown pages inside the context are left out in every head; NaN wherever nothing may be read."""
    rng = np.random.default_rng(seed)
    batch = len(lengths)
    pages = np.full((4 * batch + 1, n_kv, 2, BLOCK, DIM), math.nan)
    table = 1 + rng.permutation(4 * batch).reshape(batch, 4)
    q = rng.standard_normal((batch, n_kv * group, DIM))
    tokens: list[list[tuple[int, int]]] = [[] for _ in lengths]
    for row, length in enumerate(lengths):
        for block in range(4):
            if (row, block) in holes:
                table[row, block] = -1
                continue
            filled = max(0, min(BLOCK, length - block * BLOCK))
            pages[table[row, block], :, :, :filled] = rng.standard_normal((n_kv, 2, filled, DIM))
            tokens[row] += [(table[row, block], offset) for offset in range(filled)]
    out, lse = paged_decode_attention(
        torch.from_numpy(q), torch.from_numpy(pages), torch.from_numpy(table), torch.tensor(lengths)
    )
    for row in range(batch):
        for head in range(n_kv * group):
            keys = [pages[page, head // group, 0, offset] for page, offset in tokens[row]]
            values = [pages[page, head // group, 1, offset] for page, offset in tokens[row]]
            scores = np.array([key @ q[row, head] / math.sqrt(DIM) for key in keys])
            total = np.exp(scores).sum()
            want = (np.exp(scores) / total) @ np.stack(values) if len(keys) else np.zeros(DIM)
            np.testing.assert_allclose(out[row, head].numpy(), want, rtol=1e-10, atol=1e-10)
            expected = math.log(total) if len(keys) else -math.inf
            np.testing.assert_allclose(lse[row, head].item(), expected, rtol=1e-10, atol=1e-10)
