"""Counters by which the CTAs of a launch find out who ended last; every launch leaves zeros behind."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from nosa_sys.errors import ConfigError
from nosa_sys.kernels.launch import padded

N_TURNS = 64
"""Launches in a row that get counters of their own: no more than that may run on a device at the same time."""
_LEAST_WIDTH = 4096

_turns = itertools.count()
_rings: dict[torch.device, list[Tensor]] = {}


def arrivals_of(device: torch.device, n_groups: int) -> Tensor:
    """Zeros int32 [n_groups] for one launch, out of a ring of ``N_TURNS``; no launch clears them.

    Kept for good, and grown by doubling beside the rings that captured graphs may still use. Raises ConfigError when
    a capture would have to grow the ring: its zeros would be written by a replay alone."""
    rings = _rings.setdefault(device, [])
    if not rings or rings[-1].shape[1] < n_groups:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                f"{n_groups} groups of heads exceed the {rings[-1].shape[1] if rings else 0} counters that a capture "
                "can use on this device; run the launch once before it is captured"
            )
        rings.append(torch.zeros((N_TURNS, max(_LEAST_WIDTH, padded(n_groups))), dtype=torch.int32, device=device))
        if device.type == "cuda":
            # Launches on other streams may take the next turns at once.
            torch.cuda.current_stream(device).synchronize()
    return rings[-1][next(_turns) % N_TURNS]
