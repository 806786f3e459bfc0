"""The shortest time that each schedule's own order of work allows, from the times of its parts.

Parts are measured in the run that is judged: compute without copies, copies without compute. Layers are taken to be
alike, so a part's time a layer is its time a step over the number of layers. Two streams: compute runs in launch order,
copies run one after another, each from the moment its list is known.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parts:
    """Times of one whole step in milliseconds, layers together.

    ``before``: what a layer computes before its misses are known (projection, selection). ``beside``: what needs no
    missed block and is launched beside the copy (split_merge: attention over hits; prefetch: attention, beside which no
    guess is copied yet; else nothing). ``after``: the rest of the layers. ``outside``: embedding, output head,
    sampling. ``demand``: copies of missed blocks; ``speculative``: copies of guessed ones, queued behind the demand of
    their layer.
    """

    n_layers: int
    before: float
    beside: float
    after: float
    outside: float
    demand: float
    speculative: float = 0.0

    @property
    def compute(self) -> float:
        return self.before + self.beside + self.after + self.outside


def serial_path(parts: Parts) -> float:
    """Nothing overlaps: compute plus copies (serial: keys and values copied apart; fused_kv: together)."""
    return parts.compute + parts.demand


def split_merge_path(parts: Parts) -> float:
    """A layer's copy begins when its selection is done and runs beside ``beside``, the attention over hits."""
    n = parts.n_layers
    compute_free = 0.0
    for _ in range(n):
        compute_free += parts.before / n
        arrived = compute_free + parts.demand / n
        compute_free = max(compute_free + parts.beside / n, arrived) + parts.after / n
    return compute_free + parts.outside


def prefetch_path(parts: Parts) -> float:
    """The demand is waited for, then ``beside`` (attention) runs; guesses are copied behind it, beside what follows.

    The copy queue is free once the guesses of the layer before have arrived: they delay the next layer's demand alone.
    """
    n = parts.n_layers
    compute_free = copy_free = 0.0
    for _ in range(n):
        compute_free += parts.before / n
        arrived = max(compute_free, copy_free) + parts.demand / n
        compute_free = arrived + parts.beside / n
        copy_free = compute_free + parts.speculative / n
        compute_free += parts.after / n
    return max(compute_free, copy_free) + parts.outside


def two_batch_path(parts: Parts) -> float:
    """Two halves of the rows: one computes while the other's misses arrive.

    Parts are those of both halves together (a step that reads every matrix twice), halved here. Order of compute:
    before(A, 0), before(B, 0), then for each layer: after(A), before(A, next layer), after(B), before(B, next layer);
    each before posts the half's copy, each after waits for it.
    """
    n = parts.n_layers
    before, after, demand = (part / n / 2 for part in (parts.before, parts.beside + parts.after, parts.demand))
    compute_free = copy_free = 0.0
    arrived = [0.0, 0.0]

    def post(half: int) -> None:
        nonlocal compute_free, copy_free
        compute_free += before
        copy_free = arrived[half] = max(compute_free, copy_free) + demand

    post(0)
    post(1)
    for layer in range(n):
        for half in (0, 1):
            compute_free = max(compute_free, arrived[half]) + after
            if layer + 1 < n:
                post(half)
    return compute_free + parts.outside


CRITICAL_PATHS = {
    "serial": serial_path,
    "fused_kv": serial_path,
    "split_merge": split_merge_path,
    "two_batch": two_batch_path,
    "prefetch": prefetch_path,
}
