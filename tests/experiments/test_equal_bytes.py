"""Equal GPU bytes, from SPEC 6's own numbers and counts by hand."""

from __future__ import annotations

import pytest

from nosa_sys.engine.memory_plan import required_bytes
from nosa_sys.errors import ConfigError
from nosa_sys.experiments.equal_bytes import (
    equal_batch,
    equal_bytes_row,
    equivalent_batch,
    full_kv_bytes,
    kept_bytes,
    largest_batch,
    paper_batch,
)
from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.sparse_config import SparseConfig

SHAPE, SPARSE = ModelShape.preset("nosa-8b"), SparseConfig()
K16 = 16384


def test_nosa_8b_takes_32_kib_a_token() -> None:
    assert full_kv_bytes(SHAPE, SPARSE, K16) == K16 * 32768


def test_papers_rule_16k_of_4096_makes_64_of_16() -> None:
    kept = kept_bytes(SHAPE, SPARSE, "infllmv2", slots=64, context=K16, offload=True)
    assert paper_batch(16, kept, full_kv_bytes(SHAPE, SPARSE, K16)) == 64


def test_everything_is_paid_for_by_hand() -> None:
    kept = kept_bytes(SHAPE, SPARSE, "nosa", slots=80, context=K16, offload=True)
    heads = 32 * 2
    assert kept.kv_bytes == heads * 80 * 32768
    assert kept.budget_kv_bytes == heads * 64 * 32768
    assert kept.key_mean_bytes == heads * 1023 * 128 * 4
    assert kept.beta_bytes == heads * (1023 + K16 + 80 * 64) * 4
    full = full_kv_bytes(SHAPE, SPARSE, K16)
    batch = equal_batch(16, kept, full)
    assert batch * kept.total_bytes <= 16 * full < (batch + 1) * kept.total_bytes
    assert equivalent_batch(batch, kept, full) <= 16


def test_it_agrees_with_what_an_engine_takes() -> None:
    """But for the ring of last keys and the tables of block ids, which carry no context."""
    kept = kept_bytes(SHAPE, SPARSE, "nosa", slots=80, context=K16, offload=True)
    taken = required_bytes(SHAPE, SPARSE, get_method("nosa"), n_slots=80, offload=True, lanes=1, tokens_a_lane=K16)
    heads, ring_bytes, slot_betas = 64, 32 * 128 * 2, 80 * 64 * 4
    assert kept.kv_bytes == taken["device_slot_bytes"]
    assert kept.key_mean_bytes + kept.beta_bytes == taken["device_context_bytes"] + heads * (slot_betas - ring_bytes)


def test_key_means_in_bf16_take_half_and_betas_stay() -> None:
    sizes = {"slots": 80, "context": K16, "offload": True}
    wide = kept_bytes(SHAPE, SPARSE, "nosa", **sizes)
    narrow = kept_bytes(SHAPE, SPARSE, "nosa", **sizes, key_means_dtype="model")
    assert narrow.key_mean_bytes == 64 * 1023 * 128 * 2 == wide.key_mean_bytes // 2
    assert (narrow.kv_bytes, narrow.beta_bytes) == (wide.kv_bytes, wide.beta_bytes)
    taken = required_bytes(
        SHAPE,
        SPARSE,
        get_method("nosa"),
        n_slots=80,
        offload=True,
        lanes=1,
        tokens_a_lane=K16,
        key_means_dtype="model",
    )
    assert narrow.key_mean_bytes + narrow.beta_bytes == taken["device_context_bytes"] + 64 * (
        80 * 64 * 4 - 32 * 128 * 2
    )
    with pytest.raises(ConfigError, match="key_means_dtype='half' must be one of float32, model"):
        kept_bytes(SHAPE, SPARSE, "nosa", **sizes, key_means_dtype="half")


@pytest.mark.parametrize(
    ("method", "means", "betas"), [("nosa", True, True), ("infllmv2", True, False), ("dma", False, True)]
)
def test_a_method_pays_for_what_it_reads_alone(method: str, means: bool, betas: bool) -> None:
    kept = kept_bytes(SHAPE, SPARSE, method, slots=64, context=K16, offload=True)
    assert (kept.key_mean_bytes > 0, kept.beta_bytes > 0) == (means, betas)


def test_full_attention_equals_itself_and_residency_keeps_everything() -> None:
    row = equal_bytes_row(SHAPE, SPARSE, "full", batch=7, slots=0, context=K16, offload=False)
    assert row["equivalent_batch"] == row["equivalent_batch_paper_rule"] == 7
    resident = kept_bytes(SHAPE, SPARSE, "infllmv2", slots=64, context=K16, offload=False)
    assert resident.kv_bytes == full_kv_bytes(SHAPE, SPARSE, K16)


def test_full_attention_pays_for_its_pages_alone_as_its_engine_does() -> None:
    kept = kept_bytes(SHAPE, SPARSE, "full", slots=0, context=K16, offload=False)
    taken = required_bytes(SHAPE, SPARSE, get_method("full"), n_slots=1, offload=False, lanes=1, tokens_a_lane=K16)
    assert kept.total_bytes == kept.kv_bytes == taken["device_pool_bytes"]
    assert taken["device_context_bytes"] == 0


def test_largest_batch_names_its_limit() -> None:
    settings = {"slots": 64, "context": 98304, "offload": True}
    batch, limit = largest_batch(SHAPE, SPARSE, "nosa", **settings, gpu_bytes=110e9, host_bytes=100 * 2**30)
    assert (batch, limit) == (33, "host memory")
    batch, limit = largest_batch(SHAPE, SPARSE, "full", **settings, gpu_bytes=110e9, host_bytes=100 * 2**30)
    assert (batch, limit) == (int(110e9) // (98304 * 32768), "GPU memory")
