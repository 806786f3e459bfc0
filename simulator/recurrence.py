"""The serial schedule as numpy over many step instances at once: the fast path of sweeps.

Where no copy shares its rate the times have a closed form (a max-plus recurrence over layers); elsewhere a small
event loop advances all instances together, each to its own next event. Both follow simulator.pipeline's rules.
"""

from __future__ import annotations

import numpy as np

from nosa_sys.simulator.rates import LinkSharing, copy_rate
from nosa_sys.simulator.step_times import Floats, StepCosts, StepTimes

# Instances that the event loop advances together: its working arrays then stay in the processor's cache.
_CHUNK = 8192
_SEGMENTS_PER_LAYER = 6


def serial_times(costs: StepCosts) -> StepTimes:
    """Times of every instance under the serial schedule; see docs/simulator.md for the rules."""
    has_write_back = (costs.d2h_fixed_us + costs.d2h_us).any(axis=1)
    shared = has_write_back & ~np.broadcast_to(costs.sharing.shares_nothing, len(costs))
    gpu_end, h2d_busy, d2h_end, d2h_busy = (np.zeros(len(costs)) for _ in range(4))
    for mask, solve in ((~shared, _closed_form), (shared, _event_loop)):
        if mask.any():
            part = costs if mask.all() else costs.rows(mask)
            gpu_end[mask], h2d_busy[mask], d2h_end[mask], d2h_busy[mask] = solve(part)
    d2h_exposed = np.maximum(0.0, d2h_end - gpu_end)
    return StepTimes(
        step_us=np.maximum(gpu_end, d2h_end),
        host_us=costs.host_us.sum(axis=1) + costs.step_host_us,
        select_us=costs.select_us.sum(axis=1),
        h2d_exposed_us=h2d_busy,
        h2d_hidden_us=np.zeros(len(costs)),
        attention_us=costs.attention_us.sum(axis=1),
        gemm_us=costs.gemm_us.sum(axis=1) + costs.tail_us,
        d2h_exposed_us=d2h_exposed,
        d2h_hidden_us=np.maximum(0.0, d2h_busy - d2h_exposed),
    ).check(costs)


def _closed_form(costs: StepCosts) -> tuple[Floats, Floats, Floats, Floats]:
    """(gpu_end, h2d_busy, d2h_end, d2h_busy), each [n]: copies run at full speed, write-backs in order of posting."""
    before_post = costs.host_us + costs.select_us
    fetch = costs.h2d_fixed_us + costs.h2d_us
    layer = before_post + fetch + costs.attention_us + costs.gemm_us
    layer_end = np.cumsum(layer, axis=1) + costs.step_host_us[:, None]
    gpu_end = layer_end[:, -1] + costs.tail_us
    write = costs.d2h_fixed_us + costs.d2h_us
    written = np.cumsum(write, axis=1)
    # end = max over layers j with a write-back of (posted_j + all write-backs from j on)
    posted = layer_end - layer + before_post
    total = written[:, -1]
    end = np.where(write > 0, posted + (total[:, None] - written + write), 0.0).max(axis=1)
    return gpu_end, fetch.sum(axis=1), end, total


def _event_loop(costs: StepCosts) -> tuple[Floats, Floats, Floats, Floats]:
    """As `_closed_form`, where copies slow one another or are slowed by compute."""
    chunks = [_advance(costs.rows(slice(i, i + _CHUNK))) for i in range(0, len(costs), _CHUNK)]
    gpu_end, h2d_busy, d2h_end, d2h_busy = (np.concatenate(column) for column in zip(*chunks, strict=True))
    return gpu_end, h2d_busy, d2h_end, d2h_busy


def _advance(costs: StepCosts) -> tuple[Floats, Floats, Floats, Floats]:
    n, layers = len(costs), costs.n_layers
    # The GPU stream as a row of segments: step host | host, select, fixed, fetch, attention, gemm per layer | tail.
    per_layer = (
        costs.host_us, costs.select_us, costs.h2d_fixed_us, costs.h2d_us, costs.attention_us, costs.gemm_us,
    )  # fmt: skip
    work = np.concatenate(
        [
            costs.step_host_us[:, None],
            np.stack(per_layer, axis=2).reshape(n, layers * _SEGMENTS_PER_LAYER),
            costs.tail_us[:, None],
            np.zeros((n, 1)),
        ],
        axis=1,
    )
    n_segments = 2 + layers * _SEGMENTS_PER_LAYER
    one_layer_computes = np.array([False, True, False, False, True, True])
    one_layer_fetches = np.array([False, False, False, True, False, False])
    computes = np.concatenate([[False], np.tile(one_layer_computes, layers), [True, False]])
    fetches = np.concatenate([[False], np.tile(one_layer_fetches, layers), [False, False]])
    on_link = np.concatenate(
        [[False], np.tile(one_layer_fetches | np.roll(one_layer_fetches, -1), layers), [False] * 2]
    )
    # The write-back direction as a row of stages: fixed, bytes per layer; a layer's are posted when it has selected.
    writes = np.stack([costs.d2h_fixed_us, costs.d2h_us], axis=2).reshape(n, 2 * layers)
    writes = np.concatenate([writes, np.zeros((n, 1))], axis=1)
    n_stages = 2 * layers
    posted_at = np.append(1 + _SEGMENTS_PER_LAYER * (np.arange(n_stages) // 2) + 2, n_segments + 1)

    rows = np.arange(n)
    segment, stage = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    gpu_left, write_left = work[:, 0].copy(), writes[:, 0].copy()
    now, gpu_end, d2h_end, h2d_busy, d2h_busy = (np.zeros(n) for _ in range(5))
    beside = LinkSharing(
        np.broadcast_to(costs.sharing.duplex_factor, n), np.broadcast_to(costs.sharing.beside_compute_factor, n)
    )
    while True:
        gpu_on = segment < n_segments
        d2h_on = (stage < n_stages) & (segment >= posted_at[stage])
        if not (gpu_on | d2h_on).any():
            return gpu_end, h2d_busy, d2h_end, d2h_busy
        h2d_moves, d2h_moves = fetches[segment], d2h_on & (stage % 2 == 1)
        rate = copy_rate(computes[segment], h2d_moves, d2h_moves, beside)
        gpu_rate, write_rate = np.where(h2d_moves, rate, 1.0), np.where(d2h_moves, rate, 1.0)
        gpu_wait = np.where(gpu_on, gpu_left / gpu_rate, np.inf)
        write_wait = np.where(d2h_on, write_left / write_rate, np.inf)
        wait = np.minimum(gpu_wait, write_wait)
        wait = np.where(np.isfinite(wait), wait, 0.0)
        now += wait
        h2d_busy += np.where(on_link[segment], wait, 0.0)
        d2h_busy += np.where(d2h_on, wait, 0.0)
        gpu_done, write_done = gpu_on & (gpu_wait <= wait), d2h_on & (write_wait <= wait)
        gpu_left -= np.where(gpu_on, wait * gpu_rate, 0.0)
        write_left -= np.where(d2h_on, wait * write_rate, 0.0)
        segment += gpu_done
        stage += write_done
        gpu_left = np.where(gpu_done, work[rows, segment], np.maximum(gpu_left, 0.0))
        write_left = np.where(write_done, writes[rows, stage], np.maximum(write_left, 0.0))
        gpu_end = np.where(gpu_done & (segment == n_segments), now, gpu_end)
        # A layer without write-back passes through its stages in no time and must not count as an end.
        d2h_end = np.where(write_done & (write_wait > 0), now, d2h_end)
