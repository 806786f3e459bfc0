"""Is a situation inside what a profile was measured at: each axis that is left, with the value and the range."""

from __future__ import annotations

import numpy as np

from nosa_sys.errors import HardwareError
from nosa_sys.methods import get_method
from nosa_sys.simulator.bundle_tables import (
    ATTENTION_BYTES,
    BLOCK_SIZE,
    BLOCKS,
    CONTEXT,
    DENSE_ATTENTION_BYTES,
    FETCH_BYTES,
    HEAD_ROWS,
    K_TOKENS,
    ROWS,
    RUN_BYTES,
)
from nosa_sys.simulator.hardware import HardwareProfile
from nosa_sys.simulator.workload import Workload


def outside_grid(workload: Workload, hardware: HardwareProfile) -> list[str]:
    """A sentence for each axis on which the steps that count (cold ones do not) lie outside; none without a grid."""
    extent = _extent(workload)
    found = []
    for axis in hardware.tables.ranges:
        if axis.axis in extent:
            sentence = axis.beyond(*extent[axis.axis])
            if sentence:
                found.append(f"{sentence} of {hardware.name}")
    return found


def check_grid(workload: Workload, hardware: HardwareProfile) -> None:
    """HardwareError for a situation outside the grid, with what to do about it."""
    found = outside_grid(workload, hardware)
    if found:
        raise HardwareError(
            f"{'; '.join(found)}: it was not measured there; profile with a grid that covers it (nosa profile), come "
            "back inside, or --extrapolate (extrapolate=True), which goes on with the same forms and labels the result"
        )


def _extent(workload: Workload) -> dict[str, tuple[float, float]]:
    """(lowest, highest) value of the situation along every axis."""
    loads, sparse, shape = workload.loads, workload.sparse, workload.shape
    cold = np.asarray(loads.cold, dtype=np.bool_)
    counted = ~cold if not cold.all() else cold
    rows = loads.n_sequences[counted]
    used = rows > 0
    if not used.any():
        return {}
    context = float((loads.context_tokens[counted][used] / rows[used]).max())  # the mean sequence of a step
    batch = float(rows.max())
    attended = float(loads.attended_blocks[counted].max()) * workload.device_block_bytes
    extent = {ROWS: (batch, batch), CONTEXT: (context, context)}
    if get_method(workload.method).dense:
        return {**extent, DENSE_ATTENTION_BYTES: (attended, attended)}
    fetched = float(loads.misses[counted].max()) * workload.host_block_bytes
    blocks, block = context / sparse.block_size, float(sparse.block_size)
    return {
        **extent,
        BLOCKS: (blocks, blocks),
        BLOCK_SIZE: (block, block),
        K_TOKENS: (sparse.topk * block, sparse.topk * block),
        HEAD_ROWS: (batch * shape.n_kv_heads, batch * shape.n_kv_heads),
        ATTENTION_BYTES: (attended, attended),
        FETCH_BYTES: (fetched, fetched),
        RUN_BYTES: (float(workload.host_block_bytes),) * 2,
    }
