"""Copies of whole KV blocks between pinned host memory and device slots by a few persistent CTAs (UVA).

Every block is one contiguous run (K and V adjacent; or one of its halves alone), moved as 32-bit words whatever its
dtype. A run is cut into chunks, and a tile of ``tile_bytes`` is what one CTA has in flight: 512 threads with four
16-byte loads each at the defaults, whatever the run size. Tiles go round-robin over the CTAs: 16 CTAs keep the link
full from 64 runs of 32 KiB on.

Floor: bytes / (rate at which SMs read pinned memory, ``ceiling.py``) plus one launch and one PCIe round trip, about
3 us. Knobs worth scanning: n_ctas (4 to 32), num_warps (8, 16), tile_bytes (16 to 64 KiB),
chunk_bytes (4 to 16 KiB).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nosa_sys.errors import CapacityError, ConfigError
from nosa_sys.kernels.aot import AotSpec
from nosa_sys.kernels.block_fetch.reference import Part, check_part
from nosa_sys.kernels.launch import on_device

DEFAULT_CTAS = 16
_WORD_BYTES = 4
# Loads are 16 bytes wide, so every run has to start and end on such a boundary.
_RUN_ALIGNMENT_BYTES = 16


@triton.jit
def _row_numbers(source_rows, target_rows, order, pair, n_pairs):
    """Where the pair's block comes from and goes to; -1 past the list."""
    listed = pair < n_pairs
    entry = pair
    if order is not None:
        entry = tl.load(order + pair, mask=listed, other=0)
    source_row = tl.load(source_rows + entry, mask=listed, other=-1)
    return source_row, tl.load(target_rows + entry, mask=listed, other=-1)


# Counts of several layers may lie side by side: their alignment must not make variants, nor list lengths.
@triton.jit(do_not_specialize=["n_pairs", "n_source_rows", "n_target_rows"], do_not_specialize_on_alignment=["count"])
def copy_runs_kernel(
    source,
    target,
    source_rows,
    target_rows,
    count,
    order,
    n_pairs,
    n_source_rows,
    n_target_rows,
    PITCH_WORDS: tl.constexpr,
    START_WORDS: tl.constexpr,
    RUN_WORDS: tl.constexpr,
    CHUNK_WORDS: tl.constexpr,
    CHUNKS_PER_TILE: tl.constexpr,
):
    """target[target_rows[i]] = source[source_rows[i]] for i below count; a row outside its pool skips its pair. With
    ``order``, i is order[0], order[1] and so on.

    Rows lie PITCH_WORDS apart; of each, RUN_WORDS from START_WORDS on are copied."""
    CHUNKS_PER_RUN: tl.constexpr = (RUN_WORDS + CHUNK_WORDS - 1) // CHUNK_WORDS
    words = tl.arange(0, CHUNK_WORDS)
    chunk = tl.program_id(0) * CHUNKS_PER_TILE + tl.arange(0, CHUNKS_PER_TILE)
    step = tl.num_programs(0) * CHUNKS_PER_TILE
    # Row numbers of the next tile are always on their way while this tile's data crosses the link; the first ones
    # do not wait for the count either.
    pair = chunk // CHUNKS_PER_RUN
    source_row, target_row = _row_numbers(source_rows, target_rows, order, pair, n_pairs)
    n = n_pairs
    if count is not None:
        n = tl.minimum(tl.load(count), n_pairs)
    first = tl.program_id(0) * CHUNKS_PER_TILE
    for _ in range(first, n * CHUNKS_PER_RUN, step):
        wanted = (pair < n) & (source_row >= 0) & (source_row < n_source_rows)
        wanted = wanted & (target_row >= 0) & (target_row < n_target_rows)
        word = (chunk % CHUNKS_PER_RUN)[:, None] * CHUNK_WORDS + words[None, :]
        inside = wanted[:, None]
        if RUN_WORDS % CHUNK_WORDS != 0:
            inside = inside & (word < RUN_WORDS)
        # Skipped pairs point at row 0, so that no address is ever formed from a bad row number.
        from_row = tl.where(wanted, source_row, 0).to(tl.int64) * PITCH_WORDS + START_WORDS
        to_row = tl.where(wanted, target_row, 0).to(tl.int64) * PITCH_WORDS + START_WORDS
        data = tl.load(source + (from_row[:, None] + word), mask=inside, cache_modifier=".cg")
        chunk += step
        pair = chunk // CHUNKS_PER_RUN
        source_row, target_row = _row_numbers(source_rows, target_rows, order, pair, n_pairs)
        tl.store(target + (to_row[:, None] + word), data, mask=inside)


@triton.jit
def stream_read_kernel(source, sink, n_tiles, TILE_WORDS: tl.constexpr):
    """Read ``n_tiles`` tiles of words and keep one combined tile a program, so that no load can be dropped."""
    words = tl.arange(0, TILE_WORDS)
    combined = tl.zeros([TILE_WORDS], dtype=tl.int32)
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        combined ^= tl.load(source + (tl.cast(tile, tl.int64) * TILE_WORDS + words), cache_modifier=".cg")
    tl.store(sink + (tl.program_id(0) * TILE_WORDS + words), combined)


def run_words(source: Tensor, target: Tensor, source_name: str, target_name: str) -> int:
    """Words of one run; ConfigError unless both pools are contiguous, of one type, block shape and alignment."""
    if source.dtype != target.dtype or source.shape[1:] != target.shape[1:]:
        raise ConfigError(
            f"{source_name} blocks are {source.dtype} {tuple(source.shape[1:])}, {target_name} blocks "
            f"{target.dtype} {tuple(target.shape[1:])}; both pools must be of one type and block shape"
        )
    for name, pool in ((source_name, source), (target_name, target)):
        if not pool.is_contiguous():
            raise ConfigError(f"the {name} pool has strides {pool.stride()}; blocks must be contiguous runs")
        if pool.data_ptr() % _RUN_ALIGNMENT_BYTES:
            raise ConfigError(f"the {name} pool starts at an address that is no multiple of {_RUN_ALIGNMENT_BYTES}")
    run_bytes = source[0].numel() * source.element_size() if source.shape[0] else 0
    if run_bytes % _RUN_ALIGNMENT_BYTES:
        raise ConfigError(
            f"a block of {tuple(source.shape[1:])} {source.dtype} takes {run_bytes} bytes, no multiple of "
            f"{_RUN_ALIGNMENT_BYTES}; use a larger block or head size"
        )
    return run_bytes // _WORD_BYTES


def half_words(words: int, part: Part) -> tuple[int, int]:
    """(first word, words) of a part of a block of ``words``; ConfigError for a half that ends between two 16-byte
    loads or an unknown part."""
    check_part(part)
    if part == "kv":
        return 0, words
    half_bytes = words * _WORD_BYTES // 2
    if half_bytes % _RUN_ALIGNMENT_BYTES:
        raise ConfigError(
            f"half a block takes {half_bytes} bytes, no multiple of {_RUN_ALIGNMENT_BYTES}: K and V cannot move apart; "
            f"use part='kv' or a larger block or head size"
        )
    return (0 if part == "k" else words // 2), words // 2


def chunk_words(words: int, chunk_bytes: int) -> int:
    """Words of a chunk: the largest power of two up to ``chunk_bytes`` that divides the run, down to 2 KiB; where
    none does, ``chunk_bytes`` itself, its last chunk masked."""
    limit = chunk_bytes // _WORD_BYTES
    size = limit
    while size >= 512:
        if words % size == 0:
            return size
        size //= 2
    return min(limit, triton.next_power_of_2(words))


def copy_runs(
    source: Tensor,
    target: Tensor,
    source_rows: Tensor,
    target_rows: Tensor,
    count: Tensor | None = None,
    *,
    order: Tensor | None = None,
    part: Part = "kv",
    names: tuple[str, str] = ("source", "target"),
    n_ctas: int = DEFAULT_CTAS,
    num_warps: int = 16,
    chunk_bytes: int = 8192,
    tile_bytes: int = 32768,
) -> None:
    """Launch the copy on the current stream; nothing is read back, so a graph can hold it.

    source and target [row, 2, block, head_dim], each on the device or in pinned host memory; source_rows and
    target_rows int64 [n] and count int32 [1] on the device (None: all n). Pairs with a row outside its pool (-1 by
    convention) are skipped. ``order`` [n] integer: pairs are taken in that order, so that a short count can stand for
    pairs that lie apart. ``part`` k or v moves that half of each block alone. Raises ConfigError for pools that do
    not match or halves that no 16-byte load can end on, CapacityError for a list past 2^31 chunks.
    """
    n_pairs = source_rows.numel()
    pitch = run_words(source, target, *names)
    start, words = half_words(pitch, part)
    if n_pairs == 0 or words == 0 or target.shape[0] == 0:
        return
    size = chunk_words(words, chunk_bytes)
    n_chunks = n_pairs * -(-words // size)
    chunks_per_tile = max(1, triton.next_power_of_2(tile_bytes) // (size * _WORD_BYTES))
    if n_chunks + n_ctas * chunks_per_tile >= 2**31:
        raise CapacityError(f"a list of {n_pairs} runs needs {n_chunks} chunks, past 2^31; split the list")
    grid = (max(1, min(n_ctas, -(-n_chunks // chunks_per_tile))),)
    with on_device(source_rows):
        copy_runs_kernel[grid](
            source.view(torch.int32),
            target.view(torch.int32),
            source_rows,
            target_rows,
            count,
            order,
            n_pairs,
            source.shape[0],
            target.shape[0],
            PITCH_WORDS=pitch,
            START_WORDS=start,
            RUN_WORDS=words,
            CHUNK_WORDS=size,
            CHUNKS_PER_TILE=chunks_per_tile,
            num_warps=num_warps,
        )


def _aot_specs() -> list[AotSpec]:
    pointers = {"source": "*i32", "target": "*i32", "source_rows": "*i64", "target_rows": "*i64"}
    sizes = dict.fromkeys(("n_pairs", "n_source_rows", "n_target_rows"), "i32")
    specs = []
    variants: tuple[tuple[str, int, Part, str], ...] = (
        ("32KiB", 8192, "kv", "*i32"),
        ("20KiB", 5120, "kv", "*i32"),
        ("odd", 1500, "kv", "constexpr"),
        ("keys-of-32KiB", 8192, "k", "*i32"),
        ("values-of-15KiB", 3840, "v", "*i32"),
    )
    for name, pitch, part, count in variants:
        start, words = half_words(pitch, part)
        size = chunk_words(words, 8192)
        constants = {"PITCH_WORDS": pitch, "START_WORDS": start, "RUN_WORDS": words}
        constants |= {"CHUNK_WORDS": size, "CHUNKS_PER_TILE": max(1, 8192 // size)}
        signature = pointers | {"count": count} | sizes | dict.fromkeys(constants, "constexpr")
        absent = {"count": None} if count == "constexpr" else {}
        ordered = "*i64" if name == "20KiB" else "constexpr"
        signature |= {"order": ordered}
        absent |= {"order": None} if ordered == "constexpr" else {}
        specs.append(AotSpec(f"copy_runs-{name}", copy_runs_kernel, signature, constants | absent, 16))
    signature = {"source": "*i32", "sink": "*i32", "n_tiles": "i32", "TILE_WORDS": "constexpr"}
    specs.append(AotSpec("stream_read", stream_read_kernel, signature, {"TILE_WORDS": 8192}, 16))
    return specs


AOT_SPECS = _aot_specs()
