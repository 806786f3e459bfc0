"""A step as a schedule orders it: the pieces of the GPU stream and the transfers posted between them.

`simulator.pipeline` (SimPy) and `simulator.recurrence` (numpy) both run a Program; what a piece waits for and what
slows it is theirs to work out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from nosa_sys.simulator.rates import LinkSharing
from nosa_sys.simulator.step_times import Floats, Ints

# Parts of a step that the GPU stream spends; the host's is idle time on the device, the others are compute.
HOST, SELECT, ATTENTION, GEMM = PARTS = ("host", "select", "attention", "gemm")
H2D, D2H = "h2d", "d2h"


@dataclass(frozen=True, eq=False)
class Transfer:
    """A transfer posted to one direction of the link, arrays [n]; a row in which both times are 0 posts nothing."""

    direction: str
    name: str
    layer: int
    fixed_us: Floats
    bytes_us: Floats
    n_bytes: Ints

    @property
    def posted(self) -> np.ndarray:
        """bool [n]"""
        return self.fixed_us + self.bytes_us > 0


@dataclass(frozen=True, eq=False)
class Piece:
    """One piece of the GPU stream, ``us`` [n]; it starts when the piece before has ended and ``after`` has arrived.

    Where ``after`` was not posted (no miss) the piece does not wait for it, nor for transfers posted before it.
    """

    part: str
    name: str
    layer: int
    us: Floats
    after: Transfer | None = None


@dataclass
class Program:
    """The pieces and transfers of n step instances, in the order in which the GPU stream comes to them.

    Transfers of one direction run one after another in this order. The step ends when all has ended.
    """

    n: int
    sharing: LinkSharing
    operations: list[Piece | Transfer] = field(default_factory=list)

    def run(self, part: str, layer: int, us: Floats, *, after: Transfer | None = None, name: str = "") -> None:
        """Append a piece of the GPU stream."""
        self.operations.append(Piece(part, name or part, layer, us, after))

    def post(
        self, direction: str, layer: int, fixed_us: Floats, bytes_us: Floats, n_bytes: Ints, name: str = "copy"
    ) -> Transfer:
        """Append a transfer, posted when the piece before has ended."""
        transfer = Transfer(direction, name, layer, fixed_us, bytes_us, n_bytes)
        self.operations.append(transfer)
        return transfer

    def transfers(self, direction: str) -> Iterator[Transfer]:
        return (op for op in self.operations if isinstance(op, Transfer) and op.direction == direction)

    def alone_us(self, direction: str) -> Floats:
        """Time [n] that a direction of the link needs for all its transfers when nothing slows them."""
        return sum((t.fixed_us + t.bytes_us for t in self.transfers(direction)), np.zeros(self.n))

    def waits_for_every_fetch(self) -> bool:
        """Whether no piece ever runs while a fetch does: the piece after each fetch waits for it."""
        last: Transfer | None = None
        for op in self.operations:
            if isinstance(op, Piece):
                if last is not None and op.after is not last:
                    return False
                last = None
            elif op.direction == H2D:
                last = op
        return last is None
