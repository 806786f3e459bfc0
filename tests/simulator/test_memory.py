"""Predicted bytes are those that the engine plans and allocates; the batch that fits follows from them."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nosa_sys.engine.memory_plan import device_bytes, required_bytes
from nosa_sys.methods import METHODS, get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.simulator.hardware import load_hardware
from nosa_sys.simulator.memory import MemoryUse, memory_use
from nosa_sys.sparse_config import SparseConfig

SPARSE = SparseConfig(block_size=32, topk=12, init_blocks=1, window_size=64, select_blocks=3)


def use_of(shape: ModelShape, method: str, batch: int, context: int, slots: int, means: str = "float32") -> MemoryUse:
    block_bytes = shape.kv_block_bytes(SPARSE.block_size)
    return memory_use(
        shape, SPARSE, method, slots=slots, batch=batch, context_tokens=context, host_block_bytes=block_bytes,
        device_block_bytes=block_bytes, key_means_dtype=means,
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    layers=st.integers(1, 5), heads=st.integers(1, 4), dim=st.sampled_from([16, 64, 80]), batch=st.integers(1, 9),
    context=st.integers(1, 4000), spare=st.integers(0, 20), method=st.sampled_from(sorted(METHODS)),
    dtype=st.sampled_from(["float64", "float32", "bfloat16"]), means=st.sampled_from(["float32", "model"]),
)  # fmt: skip
def test_bytes_are_those_of_the_engines_plan(layers, heads, dim, batch, context, spare, method, dtype, means) -> None:
    shape = ModelShape("any", layers, 2 * heads, heads, dim, 64, 128, 1000, dtype=dtype)
    use = use_of(shape, method, batch, context, SPARSE.topk + spare, means)
    plan = required_bytes(
        shape, SPARSE, get_method(method), n_slots=SPARSE.topk + spare, offload=not get_method(method).dense,
        lanes=batch, tokens_a_lane=context, key_means_dtype=means,
    )  # fmt: skip
    assert use.gpu_bytes - use.weight_bytes == device_bytes(plan)
    assert use.host_pool_bytes == plan["host_pool_bytes"]
    assert sum(v for k, v in use.to_dict().items() if k not in ("gpu_bytes", "host_pool_bytes")) == use.gpu_bytes


@pytest.mark.parametrize("method", sorted(METHODS))
def test_one_sequence_more_than_fits_does_not(method: str) -> None:
    shape = ModelShape("any", 2, 4, 2, 64, 64, 128, 1000)
    small = dataclasses.replace(load_hardware("h200"), gpu_memory_bytes=60e6, host_memory_bytes=9e6)
    fits = use_of(shape, method, 3, 2000, 14).batch_that_fits(small)
    assert fits is not None
    assert fits > 1
    assert use_of(shape, method, fits, 2000, 14).limits(small) == []
    assert use_of(shape, method, fits + 1, 2000, 14).limits(small) != []
    none = dataclasses.replace(small, gpu_memory_bytes=1.0)
    assert use_of(shape, method, 3, 2000, 14).batch_that_fits(none) == 0
    assert use_of(shape, method, 3, 2000, 14).batch_that_fits(load_hardware("ideal")) is None
