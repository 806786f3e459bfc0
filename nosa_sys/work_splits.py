"""How kernels cut their work: padded sizes and CTAs a unit of it. Launchers use it, and the simulator prices by it."""

from __future__ import annotations


def padded(n: int) -> int:
    """Smallest power of two >= n, at least 1.

    >>> [padded(n) for n in (0, 1, 3, 64, 65)]
    [1, 1, 4, 64, 128]
    """
    return 1 << max(0, n - 1).bit_length()


def choose_splits(groups: int, units: int, places: int, *, max_splits: int = 64) -> int:
    """How many CTAs share one group's ``units`` of work, so that the last wave over ``places`` CTAs is full.

    The fewest splits among those that waste the least: each split costs a partial result and a share of the merge.

    >>> choose_splits(groups=128, units=64, places=264), choose_splits(groups=32, units=256, places=264)
    (2, 8)
    >>> choose_splits(groups=512, units=64, places=264)
    1
    """
    best, best_cost = 1, float("inf")
    for splits in range(1, min(units, max_splits) + 1):
        waves = -(-groups * splits // places)
        cost = waves * -(-units // splits) * (1 + 0.01 * splits)
        if cost < best_cost * 0.98:
            best, best_cost = splits, cost
    return best


def tile_units(n_blocks: int, block_size: int, tile: int) -> int:
    """Pieces that one group's blocks can be split into: small blocks share a tile of ``tile`` tokens.

    >>> tile_units(256, 32, 64), tile_units(16, 128, 64)
    (128, 16)
    """
    blocks_per_tile = max(1, tile // padded(block_size))
    return max(1, -(-n_blocks // blocks_per_tile))
