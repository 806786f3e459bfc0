"""Decode attention against dense attention in float64 over exactly the valid rows; all other memory is poisoned."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys.kernels.sparse_decode_attention.reference import merge_partials, sparse_decode_attention


@dataclass
class Case:
    """A context of each sequence [context, kv_head, ...] and its blocks scattered over device slots."""

    q: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    betas: list[torch.Tensor]
    slots: torch.Tensor
    slot_betas: torch.Tensor
    slot_rows: torch.Tensor
    block_ids: torch.Tensor
    lengths: torch.Tensor

    def run(self, with_beta: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        betas = self.slot_betas if with_beta else None
        return sparse_decode_attention(self.q, self.slots, betas, self.slot_rows, self.block_ids, self.lengths)


def make_case(
    picks: list[list[list[int]]],
    lengths: list[int],
    n_q: int,
    dim: int,
    block: int,
    dtype: torch.dtype = torch.float64,
    poison: float = math.nan,
    seed: int = 0,
) -> Case:
    """picks [batch][kv_head] lists of block ids, -1 is padding; slots are dealt out in a random order."""
    rng = torch.Generator().manual_seed(seed)
    n_kv = len(picks[0])
    beta_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    q = torch.randn(len(picks), n_q, dim, generator=rng, dtype=torch.float64).to(dtype)
    keys, values, betas = [], [], []
    for length in lengths:
        keys.append(torch.randn(length, n_kv, dim, generator=rng, dtype=torch.float64).to(dtype))
        values.append(torch.randn(length, n_kv, dim, generator=rng, dtype=torch.float64).to(dtype))
        betas.append((2 * torch.randn(length, n_kv, generator=rng, dtype=torch.float64)).to(beta_dtype))
    block_ids = torch.tensor(picks, dtype=torch.int32)
    n_rows = block_ids.numel() + 3
    slots = torch.full((n_rows, 2, block, dim), poison, dtype=dtype)
    slot_betas = torch.full((n_rows, block), poison, dtype=beta_dtype)
    slot_rows = torch.full(block_ids.shape, -1, dtype=torch.int64)
    free = torch.randperm(n_rows, generator=rng).tolist()
    for row, heads in enumerate(picks):
        for head, ids in enumerate(heads):
            for column, block_id in enumerate(ids):
                if block_id < 0:
                    continue
                slot = free.pop()
                slot_rows[row, head, column] = slot
                first, last = block_id * block, min((block_id + 1) * block, lengths[row])
                if last > first:
                    slots[slot, 0, : last - first] = keys[row][first:last, head]
                    slots[slot, 1, : last - first] = values[row][first:last, head]
                    slot_betas[slot, : last - first] = betas[row][first:last, head]
    return Case(q, keys, values, betas, slots, slot_betas, slot_rows, block_ids, torch.tensor(lengths))


def dense_over_selected(case: Case, with_beta: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Loops over sequences and query heads, numpy in float64, over the rows of the distinct selected blocks."""
    batch, n_q, dim = case.q.shape
    block = case.slots.shape[2]
    out, lse = np.zeros((batch, n_q, dim)), np.full((batch, n_q), -np.inf)
    for row in range(batch):
        length = len(case.keys[row])
        n_kv = case.block_ids.shape[1]
        for head in range(n_q):
            kv = head // (n_q // n_kv)
            ids = sorted({i for i in case.block_ids[row, kv].tolist() if i >= 0})
            rows = [t for i in ids for t in range(i * block, min((i + 1) * block, length))]
            if not rows:
                continue
            q = case.q[row, head].double().numpy()
            scores = case.keys[row][rows, kv].double().numpy() @ q / np.sqrt(dim)
            if with_beta:
                scores = scores + case.betas[row][rows, kv].double().numpy()
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ case.values[row][rows, kv].double().numpy() / weights.sum()
            lse[row, head] = scores.max() + np.log(weights.sum())
    return out, lse


def check(case: Case, with_beta: bool = True) -> None:
    out, lse = case.run(with_beta)
    expected, expected_lse = dense_over_selected(case, with_beta)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}[case.q.dtype]
    assert out.dtype == case.q.dtype
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse.double().numpy(), expected_lse, rtol=tolerance, atol=tolerance)


@given(
    n_kv=st.integers(1, 3),
    group=st.integers(1, 4),
    dim=st.sampled_from([1, 3, 80]),
    block=st.sampled_from([1, 4, 32]),
    k=st.integers(1, 6),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    with_beta=st.booleans(),
    data=st.data(),
)
def test_attention_equals_dense_over_the_selected_rows(
    n_kv: int, group: int, dim: int, block: int, k: int, dtype: torch.dtype, with_beta: bool, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 6 * block), min_size=1, max_size=3))
    entry = st.integers(-1, 6)  # padding anywhere, duplicates, and blocks past the end
    picks = [[data.draw(st.lists(entry, min_size=k, max_size=k)) for _ in range(n_kv)] for _ in lengths]
    check(make_case(picks, lengths, n_kv * group, dim, block, dtype), with_beta)


@pytest.mark.parametrize("length", [1, 150])
def test_case_01_context_shorter_than_the_budget(length: int) -> None:
    """Case 1: k = 64, 1 or 3 blocks, slots pre-filled with NaN."""
    n_blocks = -(-length // 64)
    picks = [[[*range(n_blocks)] + [-1] * (64 - n_blocks)] * 3]
    check(make_case(picks, [length], 9, 64, 64, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 4095, 4096, 4097])
def test_case_02_last_block_partly_filled(length: int, dtype: torch.dtype) -> None:
    """Case 2: NaN or 1e4 in the unused rows of K, V and bias give the same result, that of the valid rows."""
    ids = sorted({0, max(0, -(-length // 64) - 2), -(-length // 64) - 1})
    outputs = []
    for poison in (math.nan, 1e4):
        case = make_case([[ids, ids]], [length], 4, 16, 64, dtype, poison)
        check(case)
        outputs.append(case.run()[0])
    assert torch.equal(outputs[0], outputs[1])


def test_case_06_a_fully_masked_leading_chunk_and_row() -> None:
    """Case 6: 16 entries of -1 and then block 2 is attention over block 2; all -1 gives zeros and LSE -inf."""
    case = make_case([[[-1] * 16 + [2]], [[-1] * 17]], [200, 200], 2, 16, 64)
    check(case)
    out, lse = case.run()
    assert out[1].abs().max() == 0
    assert (lse[1] == -math.inf).all()
    assert out[0].abs().max() > 0


def test_case_06_a_batch_without_any_valid_entry() -> None:
    out, lse = make_case([[[-1, -1]]], [5], 3, 8, 4).run()
    assert out.tolist() == torch.zeros(1, 3, 8).tolist()
    assert (lse == -math.inf).all()


def test_case_03_a_duplicate_block_is_attended_once_even_in_two_slots() -> None:
    case = make_case([[[1, 0, 1, -1]], [[0, 1, -1, -1]]], [100, 100], 2, 8, 64)
    check(case)
    # The first of the two has no slot: the second one counts.
    case.slot_rows[0, 0, 0] = -1
    check(case)


@pytest.mark.parametrize("fill", [100.0, 1000.0])
def test_case_13_a_huge_score_stays_finite(fill: float) -> None:
    """Case 13: one block of bias 100, others 0: finite and that block's values; gradients are finite too."""
    case = make_case([[[0, 1, 2]]], [12], 1, 8, 4, torch.float32)
    case.slot_betas.nan_to_num_()[:] = 0.0
    case.slot_betas[case.slot_rows[0, 0, 1]] = fill
    case.slots[case.slot_rows[0, 0, 1], 1] = 3.0
    case.slot_betas.requires_grad_()
    out, lse = case.run()
    torch.testing.assert_close(out, torch.full_like(out, 3.0))
    assert torch.isfinite(lse).all()
    out.sum().backward()
    assert case.slot_betas.grad is not None
    assert torch.isfinite(case.slot_betas.grad).all()


@pytest.mark.parametrize(("n_q", "n_kv"), [(8, 2), (6, 2), (4, 4), (8, 1)])
def test_case_15_query_heads_read_their_own_kv_head(n_q: int, n_kv: int) -> None:
    """Case 15: V of KV head h is h + 1; query heads h*g .. h*g+g-1 read it, forward and backward."""
    case = make_case([[[0, 1]] * n_kv], [8], n_q, 4, 4)
    check(case)  # constant values cannot show which query met which keys
    for head in range(n_kv):
        case.slots[case.slot_rows[0, head], 1] = head + 1.0
    case.slots.requires_grad_()
    out, _ = case.run()
    group = n_q // n_kv
    for head in range(n_q):
        torch.testing.assert_close(out[0, head], torch.full_like(out[0, head], head // group + 1.0))
    out[0, group - 1].sum().backward()  # the last query head of KV head 0
    assert case.slots.grad is not None
    for head in range(n_kv):
        touched = case.slots.grad[case.slot_rows[0, head]].abs().sum() > 0
        assert touched.item() == (head == 0)


def test_case_11_slot_order_has_no_effect_beyond_rounding() -> None:
    outputs = []
    for seed in range(2):
        case = make_case([[[0, 2, 5], [1, 2, 5]]], [90], 6, 16, 16, seed=0)
        order = torch.randperm(len(case.slots), generator=torch.Generator().manual_seed(seed))
        case.slots, case.slot_betas = case.slots[order], case.slot_betas[order]
        case.slot_rows = order.argsort()[case.slot_rows]
        columns = torch.tensor([2, 0, 1]) if seed else torch.arange(3)
        case.slot_rows, case.block_ids = case.slot_rows[..., columns], case.block_ids[..., columns]
        outputs.append(case.run()[0])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dim", [80, 96])
def test_case_24_head_dims_that_are_no_power_of_two(dim: int) -> None:
    check(make_case([[[0, 1, 3]]], [200], 2, dim, 64, torch.float32))


@given(split=st.integers(0, 6), seed=st.integers(0, 99))
def test_merged_parts_equal_attention_over_the_union(split: int, seed: int) -> None:
    case = make_case([[[0, 1, 2, 4, 5, 6]] * 2, [[0, 1, 2, 3, -1, -1]] * 2], [50, 30], 4, 8, 8, seed=seed)
    out, lse = case.run()
    parts = []
    for columns in (slice(0, split), slice(split, None)):
        rows = torch.full_like(case.slot_rows, -1)
        rows[..., columns] = case.slot_rows[..., columns]
        parts += sparse_decode_attention(case.q, case.slots, case.slot_betas, rows, case.block_ids, case.lengths)
    merged, merged_lse = merge_partials(parts[0], parts[1], parts[2], parts[3])
    torch.testing.assert_close(merged, out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(merged_lse, lse, rtol=1e-12, atol=1e-12)


def test_case_06_merging_two_empty_parts_gives_zeros() -> None:
    empty, nothing = torch.zeros(1, 2, 4), torch.full((1, 2), -math.inf)
    out, lse = merge_partials(empty, nothing, empty, nothing)
    assert out.abs().max() == 0
    assert (lse == -math.inf).all()


def test_case_29_gradient_of_the_bias_by_finite_differences() -> None:
    """Case 29: float64 central differences over the betas, several heads sharing a block, poisoned tails."""
    case = make_case([[[0, 1, -1], [0, -1, -1]]], [7], 4, 3, 4)
    target = torch.randn(case.q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def loss(betas: torch.Tensor) -> torch.Tensor:
        case.slot_betas = betas
        return (case.run()[0] * target).sum()

    start = case.slot_betas.clone()
    betas = start.clone().requires_grad_()
    loss(betas).backward()
    assert betas.grad is not None
    used = [
        (int(case.slot_rows[0, head, column]), offset)
        for head, column, n_valid in ((0, 0, 4), (0, 1, 3), (1, 0, 4))
        for offset in range(n_valid)
    ]
    step = 1e-6
    for index in used:
        plus, minus = start.clone(), start.clone()
        plus[index] += step
        minus[index] -= step
        slope = (loss(plus) - loss(minus)).item() / (2 * step)
        assert betas.grad[index].item() == pytest.approx(slope, rel=1e-5, abs=1e-9)
    everything = betas.grad.clone()
    for index in used:
        everything[index] = 0.0
    assert (everything == 0).all()  # no gradient, and no NaN, reaches what was not read


def test_case_29_no_gradient_comes_from_poisoned_memory() -> None:
    """A zero weight times NaN is NaN in the backward pass too: invalid keys must not reach q, values not the bias."""
    case = make_case([[[1, 0, -1], [2, 2, 9]]], [9], 4, 3, 4)
    case.q.requires_grad_()
    case.slots.requires_grad_()
    out, lse = case.run()
    (out.sum() + lse.sum()).backward()
    assert case.q.grad is not None
    assert case.slots.grad is not None
    assert torch.isfinite(case.q.grad).all()
    assert torch.isfinite(case.slots.grad).all()
    assert case.q.grad.abs().max() > 0
