"""Host memory of exactly the size asked for, registered with CUDA so that kernels and copy engines reach it.

torch's own pinned allocator rounds every request up to a power of two, which doubles a pool of many gigabytes. Here a
request is one anonymous mapping, registered as it is; without CUDA the same mapping is used unregistered.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nosa_sys.errors import CapacityError

_HUGE_PAGE_BYTES = 2**21
# Tensors of one arena begin at multiples of this: the widest vector load and a copy engine's favourite border.
_ALIGNMENT_BYTES = 256
_MOST_TOUCH_THREADS = 16


class PinnedBuffer:
    """``n_bytes`` of host memory. ``mapped_bytes`` is what the system gave: n_bytes rounded up to whole pages.

    With ``register`` the memory is touched, page-locked and mapped for CUDA (``pinned_bytes`` = ``mapped_bytes``, else
    0). Raises CapacityError when so much is not free, or when CUDA refuses to register it.
    """

    def __init__(self, n_bytes: int, *, register: bool) -> None:
        self.n_bytes = n_bytes
        self.mapped_bytes = max(1, -(-n_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        refuse_unless_free(self.mapped_bytes, memory_available_bytes(), "host memory", "ask for less or free some")
        try:
            self._map = mmap.mmap(-1, self.mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise CapacityError(
                f"cannot map {self.mapped_bytes} bytes of host memory: {error.strerror}; "
                f"{memory_available_bytes()} are free; ask for less or free some"
            ) from None
        if self.mapped_bytes >= _HUGE_PAGE_BYTES:
            _advise(self._map, "MADV_HUGEPAGE")
        self._whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.pinned_bytes = 0
        self._unregister: weakref.finalize | None = None
        if register:
            _advise(self._map, "MADV_DONTFORK")  # a forked child would move the locked pages by copy-on-write
            _touch(self._whole)
            _register(self._whole.data_ptr(), self.mapped_bytes)
            self.pinned_bytes = self.mapped_bytes
            # the finalizer holds the mapping, which therefore outlives its registration
            self._unregister = weakref.finalize(self, _unregister, self._map, self._whole.data_ptr())

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, *, offset_bytes: int = 0) -> Tensor:
        """View of the memory from ``offset_bytes`` on. It keeps the mapping alive, but not its registration."""
        n_bytes = math.prod(shape) * dtype.itemsize
        return self._whole[offset_bytes : offset_bytes + n_bytes].view(dtype).view(shape)

    def release(self) -> None:
        """End the registration, at once; the memory itself goes with its last tensor. No copy may be in flight."""
        if self._unregister is not None:
            self._unregister()
        self.pinned_bytes = 0


class PinnedArena:
    """One registration that many pools in turn are carved from: registering 100 GB takes tens of seconds.

    ``take`` gives exact tensors one behind the other; nothing comes back before ``reset``, which takes back everything
    at once. ``register`` defaults to whether CUDA is there.
    """

    def __init__(self, n_bytes: int, *, register: bool | None = None) -> None:
        self._buffer = PinnedBuffer(n_bytes, register=torch.cuda.is_available() if register is None else register)
        self.n_bytes = n_bytes
        self.used_bytes = 0

    @property
    def free_bytes(self) -> int:
        return max(0, self.n_bytes - self.aligned(self.used_bytes))

    @property
    def pinned_bytes(self) -> int:
        """Page-locked bytes of the whole arena, used or not; 0 without CUDA."""
        return self._buffer.pinned_bytes

    @staticmethod
    def aligned(n_bytes: int) -> int:
        """``n_bytes`` rounded up to where the next tensor may begin."""
        return -(-n_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    @staticmethod
    def aligned_down(n_bytes: int) -> int:
        """The most of ``n_bytes`` that ends where the next tensor may begin."""
        return n_bytes // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor. CapacityError when the rest of the arena is too small."""
        n_bytes = math.prod(shape) * dtype.itemsize
        refuse_unless_free(n_bytes, self.free_bytes, "the arena", f"make it larger than {self.n_bytes} bytes")
        start = self.aligned(self.used_bytes)
        self.used_bytes = start + n_bytes
        return self._buffer.tensor(shape, dtype, offset_bytes=start)

    def reset(self) -> None:
        """Take everything back: no tensor handed out before may be used any more, nor a copy of one be in flight."""
        self.used_bytes = 0

    def release(self) -> None:
        """End the registration; see ``PinnedBuffer.release``."""
        self._buffer.release()
        self.n_bytes = self.used_bytes = 0


def refuse_unless_free(n_bytes: int, free_bytes: int, where: str, remedy: str) -> None:
    """CapacityError naming both figures when ``n_bytes`` exceed ``free_bytes``."""
    if n_bytes > free_bytes:
        raise CapacityError(f"{n_bytes} bytes of {where} are needed, {free_bytes} are free; {remedy}")


def memory_available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Host memory that can still be taken: MemAvailable, or what this process's memory cgroup leaves if that is less.

    Where the system says neither, a number that nothing exceeds.
    """
    free = [2**62]
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            free += _left_in_cgroups(cgroups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            free += _left_in_cgroups(cgroups / "memory", path, *names)
    return max(0, min(free))


def _left_in_cgroups(root: Path, path: str, limit: str, used: str, cache: str) -> list[int]:
    """Limit - use + what can be dropped, of the group and of each group above it that has a limit."""
    group, left = root / path.strip("/"), []
    while True:
        bounds = [_lines(group / name) for name in (limit, used)]
        if all(bounds) and bounds[0][0] != "max":
            stat = dict(line.split() for line in _lines(group / "memory.stat"))
            left.append(int(bounds[0][0]) - int(bounds[1][0]) + int(stat.get(cache, 0)))
        if group == root:
            return left
        group = group.parent


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _advise(mapping: mmap.mmap, advice: str) -> None:
    """Advice that this system may not know."""
    with contextlib.suppress(OSError, AttributeError):
        mapping.madvise(getattr(mmap, advice))


def _touch(whole: Tensor) -> None:
    """Have every page made by several threads: registering alone would make them one after the other."""
    pages = whole.numpy()[:: mmap.PAGESIZE]
    n_threads = min(_MOST_TOUCH_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(n_threads) as threads:
        list(threads.map(lambda part: part.fill(0), np.array_split(pages, n_threads)))


def _register(address: int, n_bytes: int) -> None:
    status = int(torch.cuda.cudart().cudaHostRegister(address, n_bytes, 0))
    if status:
        raise CapacityError(
            f"CUDA did not register {n_bytes} bytes of host memory (cudaError {status}), {memory_available_bytes()} "
            "are free; ask for less host memory, or raise the limit on locked memory (ulimit -l)"
        )


def _unregister(mapping: mmap.mmap, address: int) -> None:
    del mapping  # held until here
    torch.cuda.cudart().cudaHostUnregister(address)
