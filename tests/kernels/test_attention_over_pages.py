"""Decode attention over pages by block id, against plain float64 attention over the blocks whose page is known."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys.errors import ConfigError
from nosa_sys.kernels.sparse_decode_attention import sparse_decode_attention

BLOCK, DIM = 4, 5


def expected_row(
    q: np.ndarray, pages: np.ndarray, betas: np.ndarray, known: dict[int, int], length: int
) -> tuple[np.ndarray, float]:
    """One query head: q [DIM], pages [page, 2, BLOCK, DIM], betas [page, BLOCK] of its KV head; known: id -> page."""
    scores, values = [], []
    for block, page in known.items():
        for offset in range(min(BLOCK, length - block * BLOCK)):
            scores.append(pages[page, 0, offset] @ q / math.sqrt(DIM) + betas[page, offset])
            values.append(pages[page, 1, offset])
    if not scores:
        return np.zeros(DIM), -math.inf
    weights = np.exp(np.array(scores) - max(scores))
    return weights @ np.stack(values) / weights.sum(), max(scores) + math.log(weights.sum())


@given(
    n_kv=st.integers(1, 3),
    group=st.integers(1, 2),
    width=st.integers(0, 4),
    with_beta=st.booleans(),
    table_type=st.sampled_from([torch.int64, torch.int32]),
    lengths=st.lists(st.integers(0, 6 * BLOCK), min_size=1, max_size=3),
    data=st.data(),
)
def test_equals_attention_over_the_known_blocks(
    n_kv: int, group: int, width: int, with_beta: bool, table_type: torch.dtype, lengths: list[int], data: st.DataObject
) -> None:
    """Ids of -1, twice, past the context and past the table; pages of -1; NaN wherever nothing may be read."""
    batch, n_pages = len(lengths), 4 * len(lengths) + 2
    ids = [[data.draw(st.lists(st.integers(-1, 6), min_size=3, max_size=3)) for _ in range(n_kv)] for _ in range(batch)]
    unknown = data.draw(st.sets(st.tuples(st.integers(0, batch - 1), st.integers(0, 3))))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    table = rng.permutation(n_pages)[: batch * 4].reshape(batch, 4)
    for row, block in unknown:
        table[row, block] = -1
    pages = rng.standard_normal((n_pages, n_kv, 2, BLOCK, DIM))
    betas = 2 * rng.standard_normal((n_pages, n_kv, BLOCK)) * with_beta
    named = {int(table[row, block]): (row, block) for row in range(batch) for block in range(width)}
    for page in range(n_pages):
        row, block = named.get(page, (0, 10**6))
        filled = max(0, lengths[row] - block * BLOCK)
        pages[page, :, :, filled:] = math.nan
        betas[page, :, filled:] = math.nan
    q = rng.standard_normal((batch, n_kv * group, DIM))

    out, lse = sparse_decode_attention(
        torch.from_numpy(q),
        torch.from_numpy(pages).flatten(0, 1),
        torch.from_numpy(betas).flatten(0, 1) if with_beta else None,
        None,
        torch.tensor(ids, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        page_table=torch.from_numpy(table).to(table_type)[:, :width],
    )
    bias = betas if with_beta else np.zeros_like(betas)
    for row in range(batch):
        for head in range(n_kv * group):
            kv = head // group
            blocks = {i for i in ids[row][kv] if 0 <= i < width and table[row, i] >= 0}
            known = {i: int(table[row, i]) for i in sorted(blocks)}
            want, want_lse = expected_row(q[row, head], pages[:, kv], bias[:, kv], known, lengths[row])
            np.testing.assert_allclose(out[row, head].numpy(), want, rtol=1e-10, atol=1e-10)
            np.testing.assert_allclose(lse[row, head].item(), want_lse, rtol=1e-10)


@pytest.mark.parametrize("both", [False, True])
def test_exactly_one_of_slots_and_pages_is_given(both: bool) -> None:
    rows, table = torch.zeros(1, 1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    arguments = (torch.ones(1, 1, DIM), torch.ones(1, 2, BLOCK, DIM), None, rows if both else None)
    with pytest.raises(ConfigError, match="both of slot_rows" if both else "neither of slot_rows"):
        sparse_decode_attention(*arguments, rows.int(), torch.tensor([1]), page_table=table if both else None)
