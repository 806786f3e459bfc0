"""Bytes of KV blocks in every format, worked out by hand."""

from __future__ import annotations

import pytest

from nosa_sys.errors import ConfigError
from nosa_sys.kv_format import KvFormat
from nosa_sys.model_shape import ModelShape


@pytest.mark.parametrize(
    ("text", "block_size", "head_dim", "expected"),
    [
        ("bfloat16", 64, 128, 2 * 64 * 128 * 2),
        ("bf16", 64, 128, 32_768),
        ("float32", 32, 64, 2 * 32 * 64 * 4),
        ("fp8", 64, 128, 16_384),  # a byte a number, no scale in the block
        ("fp8:128:float32", 64, 128, 2 * (64 * 128 + 64 * 4)),  # one fp32 scale a token
        ("int4", 64, 128, 2 * (4_096 + 256)),  # 4,096 bytes of halves; two groups a token, 2 bytes each
        ("int4:32", 64, 128, 2 * (4_096 + 512)),
        ("int4:128:fp32", 64, 128, 2 * (4_096 + 256)),
        ("int4", 16, 64, 2 * (512 + 32)),
    ],
)
def test_block_bytes_by_hand(text: str, block_size: int, head_dim: int, expected: int) -> None:
    assert KvFormat.parse(text).block_bytes(block_size, head_dim) == expected
    shape = ModelShape("hand", 2, 4, 2, head_dim, 64, 128, 1000)
    assert shape.kv_block_bytes(block_size, text) == expected


def test_the_written_form_comes_back_and_says_group_and_scale() -> None:
    for text, whole in (("int4", "int4:64:float16"), ("fp8", "fp8"), ("bf16", "bfloat16"), ("int4:32:fp32", None)):
        found = KvFormat.parse(text)
        assert whole is None or str(found) == whole
        assert KvFormat.parse(str(found)) == found
    assert KvFormat.parse("int4").describe() == "int4, groups of 64 along the head dimension, one float16 scale each"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int3", "int3"),
        ("", "must be one of"),
        ("bf16:64", "bf16:64"),
        ("int4:0", "group"),
        ("int4:-1", "group"),
        ("int4:64:int8", "scale"),
        ("int4:64:float16:more", "int4:64:float16:more"),
    ],
)
def test_formats_that_are_none_are_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        KvFormat.parse(text)


def test_groups_must_fit_the_head_dimension() -> None:
    with pytest.raises(ConfigError, match=r"groups of 64 do not divide the head dimension 80; .* int4:80"):
        KvFormat.parse("int4").block_bytes(64, 80)
    with pytest.raises(ConfigError, match="no whole bytes"):
        KvFormat.parse("int4:1").block_bytes(1, 1)
