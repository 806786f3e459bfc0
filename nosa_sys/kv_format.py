"""KvFormat: how the numbers of a KV block are stored, and its bytes; torch-free, the one place where they are counted.

A quantised format is written ``fp8`` or ``int4``, with ``:GROUP`` and ``:SCALE`` behind it: every GROUP numbers along
the head dimension share one scale of type SCALE, stored in the block (symmetric, no zero point). ``int4`` alone is
``int4:64:float16``. ``fp8`` alone keeps no scale in its blocks (one a head and layer, left out of the bytes).
"""

from __future__ import annotations

from dataclasses import dataclass

from nosa_sys.errors import ConfigError

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_QUANTISED_BITS = {"fp8": 8, "int4": 4}
_DEFAULT_GROUPS = {"fp8": 0, "int4": 64}
_DEFAULT_SCALE = "float16"
SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class KvFormat:
    """``dtype`` of the numbers; ``group`` of them share a scale of ``scale_dtype`` (0: no scale in the block).

    >>> KvFormat.parse("int4").block_bytes(64, 128), KvFormat.parse("bf16").block_bytes(64, 128)
    (8704, 32768)
    """

    dtype: str
    group: int = 0
    scale_dtype: str = _DEFAULT_SCALE

    @classmethod
    def parse(cls, text: str) -> KvFormat:
        """From its written form; ConfigError names what is not understood."""
        name, *rest = str(text).split(":")
        name = SHORT_NAMES.get(name, name)
        if name in DTYPE_BYTES and not rest:
            return cls(name)
        if name not in _QUANTISED_BITS or len(rest) > 2:
            known = (*DTYPE_BYTES, *_QUANTISED_BITS)
            raise ConfigError(
                f"KV format {text!r} must be one of {', '.join(known)}; fp8 and int4 take :GROUP and :SCALE, as "
                "int4:64:float16"
            )
        group, scale = _DEFAULT_GROUPS[name], _DEFAULT_SCALE
        if rest:
            if not rest[0].isdecimal() or not 0 < int(rest[0]) <= 2**20:
                raise ConfigError(f"KV format {text!r}: the group {rest[0]!r} must be a whole number from 1 to 2^20")
            group = int(rest[0])
        if len(rest) == 2:
            scale = SHORT_NAMES.get(rest[1], rest[1])
            if scale not in DTYPE_BYTES:
                raise ConfigError(f"KV format {text!r}: the scale must be one of {', '.join(DTYPE_BYTES)}")
        return cls(name, group, scale)

    @property
    def quantised(self) -> bool:
        return self.dtype in _QUANTISED_BITS

    def block_bytes(self, block_size: int, head_dim: int) -> int:
        """Bytes of one KV block of one head, K and V, scales included: 2 * block * (D * bits / 8 + D / group * scale).

        ConfigError where groups do not fit the head dimension, or the numbers fill no whole bytes.
        """
        bits = _QUANTISED_BITS.get(self.dtype) or 8 * DTYPE_BYTES[self.dtype]
        if self.group and head_dim % self.group:
            raise ConfigError(
                f"KV format {self}: groups of {self.group} do not divide the head dimension {head_dim}; give another "
                f"group, as {self.dtype}:{head_dim}"
            )
        if block_size * head_dim * bits % 8:
            raise ConfigError(f"KV format {self}: {block_size} x {head_dim} numbers of {bits} bits are no whole bytes")
        scales = block_size * head_dim // self.group * DTYPE_BYTES[self.scale_dtype] if self.group else 0
        return 2 * (block_size * head_dim * bits // 8 + scales)

    def __str__(self) -> str:
        return f"{self.dtype}:{self.group}:{self.scale_dtype}" if self.group else self.dtype

    def describe(self) -> str:
        """The format in words."""
        if not self.quantised:
            return self.dtype
        if not self.group:
            return f"{self.dtype}, no scale in the block (one a head and layer)"
        return f"{self.dtype}, groups of {self.group} along the head dimension, one {self.scale_dtype} scale each"
