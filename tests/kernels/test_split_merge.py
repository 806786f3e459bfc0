"""Counters of split attention: who gets which, and that launches, streams and replays leave them at zero."""

import pytest
import torch

from nosa_sys.kernels.sparse_decode_attention import arrivals
from nosa_sys.kernels.sparse_decode_attention.cases import OPERATIONS
from nosa_sys.kernels.sparse_decode_attention.reference import sparse_decode_attention as reference

CPU = torch.device("cpu")


def test_launches_in_a_row_share_no_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "_rings", {})
    taken = [arrivals.arrivals_of(CPU, 4096) for _ in range(arrivals.N_TURNS)]
    for number, counters in enumerate(taken):
        assert not counters.any(), "an earlier launch reaches into these"
        counters.fill_(number + 1)
    assert arrivals.arrivals_of(CPU, 1).data_ptr() == taken[0].data_ptr()


def test_a_ring_that_grows_leaves_the_old_one_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "_rings", {})
    small = arrivals.arrivals_of(CPU, 10)
    small.fill_(7)
    large = arrivals.arrivals_of(CPU, 5000)
    assert large.numel() >= 5000
    assert not large.any()
    assert (small == 7).all()
    assert arrivals.arrivals_of(CPU, 10).numel() == large.numel()


@pytest.mark.gpu
def test_streams_and_replays_give_the_same_bits_and_leave_zeros() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    from nosa_sys.kernels.sparse_decode_attention.triton import sparse_decode_attention as fast

    device = torch.device("cuda", torch.cuda.current_device())
    operation = OPERATIONS[0]
    case = next(c for c in operation.cases() if c.name == "splits-7-hkv8")
    inputs = operation.make_inputs(case, device, torch.Generator(device).manual_seed(1))
    names = ("q", "slots", "slot_betas", "slot_rows", "block_ids", "lengths")
    arguments = [inputs[name] for name in names]
    expected = {splits: fast(*arguments, splits=splits) for splits in (2, 7, 16)}
    exact = reference(inputs["q"].float(), *arguments[1:])[0]
    streams, graphs, results = [torch.cuda.Stream() for _ in range(2)], [], []
    for stream in streams:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results.append([(splits, fast(*arguments, splits=splits)) for splits in (2, 7, 16)])
        graphs.append(graph)
    for _ in range(200):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for splits, (out, lse) in results[0] + results[1]:
        assert torch.equal(out, expected[splits][0])
        assert torch.equal(lse, expected[splits][1])
        assert (out.float() - exact).norm() <= 1e-2 * exact.norm()
    assert not arrivals._rings[device][-1].any()
