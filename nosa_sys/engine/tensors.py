"""Growing a tensor in place of a fixed head-room, and how much memory is left to grow into."""

from __future__ import annotations

import torch
from torch import Tensor

from nosa_sys.engine.pinned import memory_available_bytes


def grown(tensor: Tensor, shape: tuple[int, ...], poison: float | None, *, into: Tensor | None = None) -> Tensor:
    """A copy of ``tensor`` enlarged to ``shape`` (each size >= the old one); new entries hold ``poison`` if given.

    ``into``: uninitialised memory of that shape to use."""
    fresh = torch.empty(shape, dtype=tensor.dtype, device=tensor.device) if into is None else into
    if poison is not None:
        fresh.fill_(poison)
    fresh[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return fresh


def doubled(current: int, needed: int, floor: int = 1, *, exact: bool = False) -> int:
    """The next capacity: at least ``needed``, at least twice ``current`` when it has to grow at all.

    ``exact``: no more than ``needed``.

    >>> doubled(8, 9, 4), doubled(8, 9, 4, exact=True), doubled(8, 3, 4)
    (16, 9, 8)
    """
    if needed <= current:
        return current
    return needed if exact else max(needed, 2 * current, floor)


def stepped(current: int, needed: int, step: int) -> int:
    """The next capacity of what should move rarely: exactly ``needed`` the first time, then multiples of ``step``.

    >>> stepped(0, 9, 4), stepped(9, 10, 4), stepped(9, 3, 4)
    (9, 12, 9)
    """
    if current == 0 or needed <= current:
        return max(current, needed)
    return -(-needed // step) * step


def n_bytes(*tensors: Tensor) -> int:
    """Bytes of the elements of all ``tensors``."""
    return sum(t.numel() * t.element_size() for t in tensors)


def free_bytes(device: torch.device) -> int:
    """Memory of ``device`` that new tensors can take: on a GPU what the driver has left and torch holds unused."""
    if device.type != "cuda":
        return memory_available_bytes()
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held
