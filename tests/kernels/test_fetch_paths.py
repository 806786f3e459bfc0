"""Fetch: the dispatcher's counted lists, chunk and ring sizes, and the build of the bulk-copy kernel."""

import ctypes
from pathlib import Path
from typing import Literal

import pytest
import torch

from nosa_sys.errors import ConfigError
from nosa_sys.kernels.block_fetch import fetch_blocks, write_back


def _pools() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator()
    generator.manual_seed(3)
    host = torch.randn((6, 2, 4, 8), generator=generator)
    return host, torch.full((5, 2, 4, 8), torch.nan)


def test_only_the_counted_pairs_are_fetched() -> None:
    host, slots = _pools()
    rows, targets = torch.tensor([4, -1, 2, 5]), torch.tensor([1, 0, 3, 4])
    fetch_blocks(host, slots, rows, targets, torch.tensor([3], dtype=torch.int32))
    assert torch.equal(slots[1], host[4])
    assert torch.equal(slots[3], host[2])
    assert slots[[0, 2, 4]].isnan().all()


def test_only_the_counted_pairs_are_written_back() -> None:
    host, slots = _pools()
    before = host.clone()
    slots[2], slots[4] = 2.0, 4.0
    write_back(slots, host, torch.tensor([2, 4]), torch.tensor([0, 1]), torch.tensor([1], dtype=torch.int32))
    assert (host[0] == 2.0).all()
    assert torch.equal(host[1:], before[1:])


@pytest.mark.parametrize(("part", "half", "other"), [("k", 0, 1), ("v", 1, 0)])
def test_one_half_of_each_counted_pair_is_fetched(part: Literal["k", "v"], half: int, other: int) -> None:
    host, slots = _pools()
    rows, targets = torch.tensor([4, -1, 2, 5]), torch.tensor([1, 0, 3, 4])
    fetch_blocks(host, slots, rows, targets, torch.tensor([3], dtype=torch.int32), part=part)
    assert torch.equal(slots[1, half], host[4, half])
    assert torch.equal(slots[3, half], host[2, half])
    assert slots[[0, 2, 4]].isnan().all()
    assert slots[:, other].isnan().all()


def test_keys_and_then_values_make_the_whole_block() -> None:
    host, slots = _pools()
    rows = torch.tensor([5, 0])
    fetch_blocks(host, slots, rows, torch.tensor([0, 3]), part="k")
    fetch_blocks(host, slots, rows, torch.tensor([0, 3]), part="v")
    assert torch.equal(slots[[0, 3]], host[rows])


def test_parts_and_paths_that_do_not_exist_are_refused() -> None:
    host, slots = _pools()
    row = torch.tensor([0])
    with pytest.raises(ConfigError, match=r"part='keys'.*kv, k, v"):
        fetch_blocks(host, slots, row, row, part="keys")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"path='dma'.*uva, bulk"):
        fetch_blocks(host, slots, row, row, path="dma")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"path='dma'.*uva, bulk"):
        write_back(slots, host, row, row, path="dma")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'bulk' moves whole blocks"):
        fetch_blocks(host, slots, row, row, part="v", path="bulk")
    assert slots.isnan().all()


def test_halves_that_no_load_can_end_on_are_refused() -> None:
    triton_fetch = pytest.importorskip("nosa_sys.kernels.block_fetch.triton")
    assert triton_fetch.half_words(1500 * 8, "kv") == (0, 12_000)
    assert triton_fetch.half_words(12_000, "k") == (0, 6_000)
    assert triton_fetch.half_words(12_000, "v") == (6_000, 6_000)
    with pytest.raises(ConfigError, match="half a block takes 24 bytes"):
        triton_fetch.half_words(12, "v")


def test_chunks_divide_the_run_where_they_can() -> None:
    triton_fetch = pytest.importorskip("nosa_sys.kernels.block_fetch.triton")
    kib = 256  # words
    assert triton_fetch.chunk_words(32 * kib, 8192) == 8 * kib
    assert triton_fetch.chunk_words(20 * kib, 8192) == 4 * kib
    assert triton_fetch.chunk_words(4 * kib, 8192) == 4 * kib
    # 2 * 48 * 80 * 2 bytes: no power of two from 2 KiB on divides 7.5 chunks of 2 KiB
    assert triton_fetch.chunk_words(15 * kib // 2, 8192) == 8 * kib
    assert triton_fetch.chunk_words(100, 8192) == 128


def test_unaligned_or_strided_pools_are_refused_by_name() -> None:
    triton_fetch = pytest.importorskip("nosa_sys.kernels.block_fetch.triton")
    host, slots = _pools()
    with pytest.raises(ConfigError, match="host pool has strides"):
        triton_fetch.run_words(host.transpose(2, 3).contiguous().transpose(2, 3), slots, "host", "slot")
    with pytest.raises(ConfigError, match="both pools must be of one type"):
        triton_fetch.run_words(host.half(), slots, "host", "slot")
    with pytest.raises(ConfigError, match="no multiple of 16"):
        triton_fetch.run_words(torch.zeros(3, 2, 1, 3), torch.zeros(3, 2, 1, 3), "host", "slot")


def test_the_ring_of_the_bulk_copy_fits_shared_memory() -> None:
    bulk = pytest.importorskip("nosa_sys.kernels.block_fetch.bulk")
    assert bulk.ring_shape(32768, None, None) == (16384, 14)
    assert bulk.ring_shape(4096, None, None) == (4096, 32)
    assert bulk.ring_shape(15360, 8192, 4) == (8192, 4)
    for run_bytes, chunk, stages in ((32768, 16384, 15), (32768, 24, 4), (32768, 8192, 1), (32768, 1024, 33)):
        with pytest.raises(ConfigError, match="multiple of 16"):
            bulk.ring_shape(run_bytes, chunk, stages)


def test_the_bulk_copy_builds_once_into_its_cache(tmp_path: Path) -> None:
    bulk = pytest.importorskip("nosa_sys.kernels.block_fetch.bulk")
    if bulk.nvcc_path() is None:
        pytest.skip("no nvcc here")
    library = bulk.build(tmp_path)
    assert ctypes.CDLL(str(library)).launch_bulk_copy
    assert [p.name for p in tmp_path.iterdir()] == [library.name]
    changed = library.stat().st_mtime_ns
    assert bulk.build(tmp_path) == library
    assert library.stat().st_mtime_ns == changed
