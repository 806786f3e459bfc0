"""Window means against numpy loops; the incremental path is bit-equal to the one from scratch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys.kernels.compressed_keys.reference import completes_window, window_mean_of_tail, window_means


def loop_means(x: np.ndarray, kernel: int, stride: int) -> list[np.ndarray]:
    means, start = [], 0
    while start + kernel <= len(x):
        means.append(x[start : start + kernel].astype(np.float64).mean(0))
        start += stride
    return means


@given(
    length=st.integers(0, 70),
    stride=st.sampled_from([1, 2, 3, 16]),
    tail_shape=st.sampled_from([(2,), (3, 5)]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_means_equal_a_loop(length: int, stride: int, tail_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(length, *tail_shape, generator=torch.Generator().manual_seed(length)).to(dtype)
    means = window_means(x, 2 * stride, stride)
    expected = loop_means(x.double().numpy(), 2 * stride, stride)
    assert means.shape == (len(expected), *tail_shape)
    assert means.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for got, want in zip(means, expected, strict=True):
        np.testing.assert_allclose(got.double().numpy(), want, rtol=1e-6, atol=1e-6)


@given(length=st.integers(1, 80), stride=st.sampled_from([1, 2, 5, 16]), batch=st.integers(1, 3))
def test_decoding_one_token_at_a_time_gives_the_same_bits(length: int, stride: int, batch: int) -> None:
    kernel = 2 * stride
    x = torch.randn(batch, length, 3, 4, generator=torch.Generator().manual_seed(length))
    grown: list[torch.Tensor] = []
    for context in range(1, length + 1):
        if completes_window(context, kernel, stride):
            grown.append(window_mean_of_tail(x[:, context - kernel : context]))
    for row in range(batch):
        whole = window_means(x[row], kernel, stride)
        assert len(grown) == len(whole)
        for i, mean in enumerate(grown):
            assert torch.equal(mean[row], whole[i])


@given(length=st.integers(0, 90), cut=st.integers(0, 5), stride=st.sampled_from([2, 16]))
def test_a_slice_at_a_multiple_of_the_stride_gives_the_same_bits(length: int, cut: int, stride: int) -> None:
    x = torch.randn(length, 2, 3, generator=torch.Generator().manual_seed(length))
    assert torch.equal(window_means(x, 2 * stride, stride)[cut:], window_means(x[cut * stride :], 2 * stride, stride))


@pytest.mark.parametrize(("length", "count"), [(31, 0), (32, 1), (40, 1), (47, 1), (48, 2)])
def test_case_21_window_counts_of_short_contexts(length: int, count: int) -> None:
    """Case 21: lengths 31, 32, 40, 47 and 48 give 0, 1, 1, 1 and 2 windows."""
    assert len(window_means(torch.zeros(length, 2, 8), 32, 16)) == count
    assert sum(completes_window(n, 32, 16) for n in range(1, length + 1)) == count


def test_case_21_no_window_mixes_two_sequences() -> None:
    """Case 21: sequences of 100 and 156 tokens hold 5 and 8 windows of their own constant."""
    first, second = torch.ones(100, 1), torch.full((156, 1), 2.0)
    assert window_means(first, 32, 16).flatten().tolist() == [1.0] * 5
    assert window_means(second, 32, 16).flatten().tolist() == [2.0] * 8


def test_completes_window_takes_tensors() -> None:
    lengths = torch.arange(100)
    expected = [completes_window(n, 32, 16) for n in range(100)]
    assert completes_window(lengths, 32, 16).tolist() == expected
    assert [n for n in range(100) if expected[n]] == [32, 48, 64, 80, 96]


def test_means_carry_gradients() -> None:
    x = torch.randn(10, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: window_means(x, 4, 2), (x,))
