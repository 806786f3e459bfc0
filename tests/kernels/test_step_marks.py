"""Time marks: the host's clock where there is no device, and the device's timer in the compiled kernel."""

import re
import time

import pytest
import torch

from nosa_sys.errors import CapacityError, ConfigError
from nosa_sys.kernels.step_marks import mark


def test_marks_lie_between_the_clock_before_and_after() -> None:
    buffer = torch.full((3,), -1)
    before = time.perf_counter_ns()
    mark(buffer, 2)
    mark(buffer, 0)
    after = time.perf_counter_ns()
    assert before <= buffer[2].item() <= buffer[0].item() <= after
    assert buffer[1].item() == -1


@pytest.mark.parametrize("index", [-1, 3])
def test_a_mark_outside_the_buffer_is_refused(index: int) -> None:
    with pytest.raises(CapacityError, match=rf"mark {index} is outside the buffer of 3; allowed: 0\.\.2"):
        mark(torch.zeros(3, dtype=torch.int64), index)


@pytest.mark.parametrize("buffer", [torch.zeros(3), torch.zeros(2, 2).long(), torch.zeros(6).long()[::2]])
def test_other_buffers_are_refused(buffer: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="contiguous int64 vector"):
        mark(buffer, 0)


def test_the_kernel_stores_one_read_of_the_global_timer() -> None:
    pytest.importorskip("triton")
    from nosa_sys.kernels.aot import compile_for_sm90
    from nosa_sys.kernels.step_marks.triton import AOT_SPECS

    ptx = compile_for_sm90(AOT_SPECS[0]).asm["ptx"]
    reads = re.findall(r"mov\.u64\s+(%\w+), %globaltimer;", ptx)
    assert len(reads) == 1
    assert len(re.findall(r"st\.global\S*\.b64", ptx)) == 1


@pytest.mark.gpu
def test_marks_around_work_on_a_gpu_grow() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    buffer = torch.zeros(2, dtype=torch.int64, device="cuda")
    mark(buffer, 0)
    torch.cuda._sleep(2_000_000)
    mark(buffer, 1)
    start, end = buffer.tolist()
    assert 100_000 < end - start < 1_000_000_000
