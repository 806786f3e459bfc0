"""Exact host memory: sizes, registration by a stand-in for the CUDA runtime, refusals, the arena, free memory."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch

from nosa_sys.engine import pinned
from nosa_sys.engine.pinned import PinnedArena, PinnedBuffer, memory_available_bytes
from nosa_sys.errors import CapacityError

PAGE = mmap.PAGESIZE


class Runtime:
    """Stands in for the CUDA runtime: notes what is registered; ``status`` is what registering answers."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:
        assert flags == 0
        if not self.status:
            self.registered[address] = n_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


@pytest.mark.parametrize("n_bytes", [1, PAGE - 1, PAGE, PAGE + 1, 3 * 2**20, 5 * 2**20 + 1])
def test_case_23_registered_bytes_are_those_asked_for_within_a_page(runtime: Runtime, n_bytes: int) -> None:
    buffer = PinnedBuffer(n_bytes, register=True)
    view = buffer.tensor((n_bytes,), torch.uint8)
    assert list(runtime.registered.items()) == [(view.data_ptr(), buffer.pinned_bytes)]
    assert n_bytes <= buffer.pinned_bytes < n_bytes + PAGE
    view[-1] = 7
    buffer.release()
    assert (runtime.registered, buffer.pinned_bytes) == ({}, 0)
    assert view[-1] == 7  # the mapping lives as long as its views
    buffer.release()  # again does nothing


def test_a_buffer_that_nobody_holds_is_unregistered(runtime: Runtime) -> None:
    buffer = PinnedBuffer(10, register=True)
    assert runtime.registered
    del buffer
    gc.collect()
    assert not runtime.registered


def test_registration_that_fails_names_bytes_and_remedy(runtime: Runtime) -> None:
    runtime.status = 2
    with pytest.raises(CapacityError, match=rf"register {PAGE} bytes.*cudaError 2.*are free; .*ulimit -l"):
        PinnedBuffer(10, register=True)


def test_more_than_is_free_is_refused_before_it_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "memory_available_bytes", lambda: 2 * PAGE)
    PinnedBuffer(2 * PAGE, register=False)
    monkeypatch.setattr(pinned.mmap, "mmap", lambda *_, **__: pytest.fail("mapped"))
    with pytest.raises(CapacityError, match=rf"{3 * PAGE} bytes of host memory are needed, {2 * PAGE} are free"):
        PinnedBuffer(2 * PAGE + 1, register=False)


def test_without_registration_nothing_is_pinned() -> None:
    buffer = PinnedBuffer(24, register=False)
    numbers = buffer.tensor((2, 3), torch.float32)
    numbers[:] = torch.arange(6.0).view(2, 3)
    assert buffer.tensor((6,), torch.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert buffer.pinned_bytes == 0


def test_arena_gives_exact_tensors_that_do_not_overlap(runtime: Runtime) -> None:
    arena = PinnedArena(1000, register=True)
    assert len(runtime.registered) == 1
    first, second = arena.take((3, 7), torch.uint8), arena.take((5,), torch.float64)
    assert second.data_ptr() - first.data_ptr() == 256  # the next border
    first.fill_(1)
    second.fill_(2.0)
    assert (first == 1).all()
    assert (arena.used_bytes, arena.free_bytes) == (256 + 40, 1000 - 512)
    with pytest.raises(CapacityError, match=r"489 bytes of the arena are needed, 488 are free; .*1000 bytes"):
        arena.take((489,), torch.uint8)
    arena.take((488,), torch.uint8)
    arena.reset()
    assert arena.take((1000,), torch.uint8).data_ptr() == first.data_ptr()
    assert len(runtime.registered) == 1
    arena.release()
    assert not runtime.registered


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {}, 5000 * 1024),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/b/memory.current": "7\n"}, 5000 * 1024),
        (
            "0::/a/b\n",
            {"a/memory.max": "4000\n", "a/memory.current": "1500\n", "a/memory.stat": "anon 9\ninactive_file 100\n"},
            2600,
        ),
        (
            "9:cpu:/x\n4:memory:/c\n0::/\n",
            {
                "memory/c/memory.limit_in_bytes": "3000\n",
                "memory/c/memory.usage_in_bytes": "1000\n",
                "memory/c/memory.stat": "total_inactive_file 50\n",
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/memory.usage_in_bytes": "1000\n",
            },
            2050,
        ),
        ("0::/\n", {"memory.max": "10\n", "memory.current": "30\n"}, 0),
    ],
)
def test_free_memory_is_the_least_that_anyone_leaves(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: int
) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc, {"meminfo": "MemTotal: 9999 kB\nMemAvailable: 5000 kB\n", "self/cgroup": cgroup})
    write(groups, files)
    assert memory_available_bytes(proc, groups) == expected


def test_free_memory_of_this_machine() -> None:
    assert 0 < memory_available_bytes() < 2**50
