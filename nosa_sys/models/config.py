"""LlamaConfig: what the forward pass needs to know beyond ModelShape's sizes; torch-free."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nosa_sys.errors import CheckpointError, ConfigError
from nosa_sys.model_shape import ModelShape

ROPE_TYPES = ("default", "linear", "llama3")
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# Keys of other Llama-like families that change the arithmetic, with the only value that leaves it plain Llama.
PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", "swish", None),
    "scale_emb": (1, None),
    "scale_depth": (None,),
    "dim_model_base": (None,),
    "sliding_window": (None,),
    "quantization_config": (None,),
}


def _is_positive(value: Any) -> bool:
    """A finite number > 0; an int beyond the range of a float is none."""
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value <= sys.float_info.max


@dataclass(frozen=True)
class RopeScaling:
    """Rotary scaling: ``kind`` default | linear | llama3, with the factors that the kind uses."""

    kind: str = "default"
    factors: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in ROPE_TYPES:
            raise ConfigError(f"rope_scaling type {self.kind!r} is not supported; known: {', '.join(ROPE_TYPES)}")
        for key in ROPE_KEYS[self.kind]:
            value = self.factors.get(key)
            if not _is_positive(value):
                raise ConfigError(f"rope_scaling {self.kind}: {key}={value!r} must be a number > 0")
        if self.kind == "llama3" and self.factors["high_freq_factor"] <= self.factors["low_freq_factor"]:
            raise ConfigError(
                f"rope_scaling llama3: high_freq_factor={self.factors['high_freq_factor']} must exceed "
                f"low_freq_factor={self.factors['low_freq_factor']}"
            )


@dataclass(frozen=True)
class LlamaConfig:
    """One Llama-like model: sizes, rotary settings, norm epsilon and stop tokens.

    ``max_positions`` is the context length in tokens that the model was made for; longer contexts run, but
    unscaled rotary angles were never trained there.
    """

    shape: ModelShape
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    rms_norm_eps: float = 1e-5
    max_positions: int = 8192
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            if not _is_positive(value):
                raise ConfigError(f"model {self.shape.name}: {name}={value!r} must be a number > 0")
        if isinstance(self.max_positions, bool) or not isinstance(self.max_positions, int) or self.max_positions < 1:
            raise ConfigError(
                f"model {self.shape.name}: max_position_embeddings={self.max_positions!r} must be a whole number >= 1"
            )
        if self.shape.head_dim % 2:
            raise ConfigError(f"model {self.shape.name}: head_dim={self.shape.head_dim} must be even for RoPE")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; ``from_dict`` reads them back."""
        return {
            "shape": self.shape.to_dict(),
            "rope_theta": self.rope_theta,
            "rope_scaling": {"kind": self.rope_scaling.kind, "factors": self.rope_scaling.factors},
            "rms_norm_eps": self.rms_norm_eps,
            "max_positions": self.max_positions,
            "eos_ids": list(self.eos_ids),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LlamaConfig:
        return cls(
            shape=ModelShape.from_dict(data["shape"]),
            rope_theta=data["rope_theta"],
            rope_scaling=RopeScaling(**data["rope_scaling"]),
            rms_norm_eps=data["rms_norm_eps"],
            max_positions=data["max_positions"],
            eos_ids=tuple(data["eos_ids"]),
        )

    @classmethod
    def from_hf(cls, path: Path) -> LlamaConfig:
        """Read a Hugging Face config.json, of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters).

        Raises CheckpointError naming the file and the key; a key that would change the arithmetic (biases, other
        activations, embedding scales, sliding windows) is refused rather than ignored.
        """
        try:
            shape = ModelShape.from_hf_config(path)
            raw = json.loads(path.read_text(encoding="utf-8"))
            for key, plain in PLAIN_VALUES.items():
                if raw.get(key) not in plain:
                    raise ConfigError(f"{key}={raw[key]!r} is not supported; only plain Llama layers are")
            rope = _rope_entry(raw)
            kind = str(rope.get("rope_type") or rope.get("type") or "default")
            known = ROPE_KEYS.get(kind, ())
            config = cls(
                shape=shape,
                rope_theta=rope.get("rope_theta") or raw.get("rope_theta", 10000.0),
                rope_scaling=RopeScaling(kind, {key: rope[key] for key in known if key in rope}),
                rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
                max_positions=raw.get("max_position_embeddings", 2048),
                eos_ids=stop_ids(raw.get("eos_token_id")),
            )
        except ConfigError as error:
            message = str(error)
            raise CheckpointError(message if str(path) in message else f"{path}: {message}") from None
        return config

    def with_dtype(self, dtype: str) -> LlamaConfig:
        """The same model held in another dtype."""
        return dataclasses.replace(self, shape=dataclasses.replace(self.shape, dtype=dtype))


def _rope_entry(raw: dict[str, Any]) -> dict[str, Any]:
    for key in ("rope_parameters", "rope_scaling"):
        entry = raw.get(key)
        if entry is None:
            continue
        if not isinstance(entry, dict):
            raise ConfigError(f"{key}={entry!r} must be an object")
        return entry
    return {}


def stop_ids(value: Any) -> tuple[int, ...]:
    """eos_token_id of a config: absent, one id or a list of ids."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ConfigError(f"eos_token_id={value!r} must be a token id or a list of them")
    return tuple(ids)
