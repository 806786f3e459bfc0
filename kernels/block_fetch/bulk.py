"""Fetch and write-back with the bulk copy engine: ``bulk_copy.cu``, built by plain nvcc at first use (seconds).

One warp a CTA and 1 to 4 CTAs hold the link, against 16 CTAs of 512 threads for the Triton kernel: more SMs stay free
for compute. Needs sm_90 and nvcc; nothing else in the package does, and nothing here is imported without a call.
Floor as for the Triton kernel plus about 1 us: the count, then the rows, then the data are fetched one after another.
Knobs worth scanning: n_ctas (1, 2, 4, 8), chunk_bytes (4 to 32 KiB), n_stages (chunk_bytes * n_stages <= 224 KiB).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from nosa_sys.errors import ConfigError, HardwareError
from nosa_sys.kernels.block_fetch.triton import run_words

# Each takes an SM for itself; two saturate the link alone, three beside compute too (scan: kernel_limits).
DEFAULT_BULK_CTAS = 3
# A CTA may use 227 KiB of shared memory on sm_90; 3 KiB are left for barriers and the system.
MAX_RING_BYTES = 224 * 1024
MAX_STAGES = 32
_SOURCE = Path(__file__).with_name("bulk_copy.cu")
_NVCC_FLAGS = ("-O3", "-gencode=arch=compute_90,code=sm_90", "-shared", "-Xcompiler", "-fPIC", "--cudart", "static")


def nvcc_path() -> str | None:
    """nvcc on PATH, or under $CUDA_HOME, or in the usual place."""
    places = (os.environ.get("CUDA_HOME"), "/usr/local/cuda")
    found = [shutil.which("nvcc"), *(shutil.which(f"{place}/bin/nvcc") for place in places if place)]
    return next((path for path in found if path), None)


def build(cache: Path) -> Path:
    """Compile into ``cache`` unless this very source is there already; returns the shared library.

    Raises HardwareError when there is no nvcc or it fails.
    """
    nvcc = nvcc_path()
    if nvcc is None:
        raise HardwareError("the bulk-copy path needs nvcc on PATH or under CUDA_HOME; use the path 'uva' instead")
    key = hashlib.sha256(_SOURCE.read_bytes() + " ".join((nvcc, *_NVCC_FLAGS)).encode()).hexdigest()[:16]
    library = cache / f"bulk_copy_{key}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    # Built beside its final name and renamed, so that two processes never see half a file.
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        built = Path(folder) / library.name
        done = subprocess.run([nvcc, *_NVCC_FLAGS, "-o", str(built), str(_SOURCE)], capture_output=True, text=True)
        if done.returncode:
            raise HardwareError(f"nvcc failed on {_SOURCE.name}: {done.stderr.strip()[-500:]}")
        built.replace(library)
    return library


@functools.cache
def _launcher() -> Callable[..., int]:
    """The library's launch function: loaded once a process."""
    root = Path(os.environ.get("NOSA_CACHE", Path.home() / ".cache" / "nosa-sys"))
    launch = ctypes.CDLL(str(build(root / "kernels"))).launch_bulk_copy
    pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    launch.argtypes = [*[pointer] * 5, *[long] * 4, *[integer] * 3, pointer]
    launch.restype = integer
    return launch


def ring_shape(run_bytes: int, chunk_bytes: int | None, n_stages: int | None) -> tuple[int, int]:
    """Chunk size and ring length in use: chunks of at most 16 KiB, as many as shared memory holds.

    Raises ConfigError for a chunk that is no multiple of 16 bytes or a ring that does not fit.
    """
    chunk = min(chunk_bytes or 16384, run_bytes)
    stages = n_stages or min(MAX_STAGES, MAX_RING_BYTES // chunk)
    if chunk % 16 or not 2 <= stages <= MAX_STAGES or chunk * stages > MAX_RING_BYTES:
        raise ConfigError(
            f"chunk_bytes={chunk} x n_stages={stages} must be a multiple of 16 bytes x 2..{MAX_STAGES} stages and at "
            f"most {MAX_RING_BYTES} bytes together"
        )
    return chunk, stages


def bulk_copy_runs(
    source: Tensor,
    target: Tensor,
    source_rows: Tensor,
    target_rows: Tensor,
    count: Tensor | None = None,
    *,
    n_ctas: int = DEFAULT_BULK_CTAS,
    chunk_bytes: int | None = None,
    n_stages: int | None = None,
) -> None:
    """As ``triton.copy_runs``, through the bulk copy engine; capturable in a graph after its first call.

    Raises HardwareError without nvcc or when the launch fails.
    """
    words = run_words(source, target, "source", "target")
    n_pairs = source_rows.numel()
    if n_pairs == 0 or words == 0 or target.shape[0] == 0:
        return
    chunk, stages = ring_shape(words * 4, chunk_bytes, n_stages)
    launch = _launcher()
    with torch.cuda.device(source_rows.device):
        status = launch(
            source.data_ptr(),
            target.data_ptr(),
            source_rows.data_ptr(),
            target_rows.data_ptr(),
            None if count is None else count.data_ptr(),
            n_pairs,
            source.shape[0],
            target.shape[0],
            words * 4,
            chunk,
            stages,
            n_ctas,
            torch.cuda.current_stream().cuda_stream,
        )
    if status:
        raise HardwareError(f"bulk copy launch failed with CUDA error {status} (n_ctas={n_ctas}, {stages} x {chunk} B)")
