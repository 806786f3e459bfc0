"""ModelShape: the sizes of a Llama-like model that bytes and FLOPs depend on, torch-free."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nosa_sys.errors import ConfigError
from nosa_sys.kv_format import DTYPE_BYTES as DTYPE_BYTES
from nosa_sys.kv_format import KvFormat


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model. ``assumed`` names the sizes that are not published.

    >>> ModelShape.preset("nosa-8b").kv_block_bytes(64)
    32768
    """

    name: str
    n_layers: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    dtype: str = "bfloat16"
    tied_embedding: bool = False
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name in ("name", "dtype", "tied_embedding", "assumed"):
                continue
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**31 - 1:
                raise ConfigError(f"model {self.name}: {field.name}={value!r} must be a whole number >= 1")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"model {self.name}: dtype={self.dtype!r} must be one of {', '.join(DTYPE_BYTES)}")
        if self.n_q_heads % self.n_kv_heads:
            raise ConfigError(
                f"model {self.name}: n_q_heads={self.n_q_heads} must be a multiple of n_kv_heads={self.n_kv_heads}"
            )
        object.__setattr__(self, "assumed", tuple(self.assumed))

    @property
    def group(self) -> int:
        """g = Hq / Hkv: query heads that share a KV head."""
        return self.n_q_heads // self.n_kv_heads

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def kv_block_bytes(self, block_size: int, dtype: str | None = None) -> int:
        """Bytes of one KV block of one head, K and V: 2 * block * D * e; ``dtype``: any `KvFormat`, as int4:64."""
        return KvFormat.parse(dtype or self.dtype).block_bytes(block_size, self.head_dim)

    @property
    def layer_params(self) -> int:
        """Matrix parameters of one layer: q, k, v, o projections and the gated MLP."""
        attention = self.hidden_size * self.head_dim * (2 * self.n_q_heads + 2 * self.n_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices, the embedding counted once when tied."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embedding else 2)
        return (self.n_layers * self.layer_params + embeddings) * self.dtype_bytes

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "assumed": list(self.assumed)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelShape:
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ConfigError(f"unknown model shape key {unknown[0]!r}; known: {', '.join(sorted(known))}")
        try:
            return cls(**data)
        except TypeError as error:
            raise ConfigError(f"model shape is incomplete: {error}") from None

    @classmethod
    def preset(cls, name: str) -> ModelShape:
        if name not in PRESETS:
            raise ConfigError(f"unknown model shape {name!r}; known: {', '.join(PRESETS)} or a config.json")
        return PRESETS[name]

    @classmethod
    def from_hf_config(cls, path: str | Path, dtype: str | None = None) -> ModelShape:
        """Read a Hugging Face config.json (or the directory that holds one).

        head_dim is taken from the config where it is there, hidden/heads only where it is not.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read model config {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(config, dict):
            raise ConfigError(f"{path} must hold a JSON object")

        def need(key: str) -> int:
            if not isinstance(config.get(key), int) or isinstance(config.get(key), bool):
                raise ConfigError(f"{path}: {key}={config.get(key)!r} must be a whole number")
            return int(config[key])

        hidden, heads = need("hidden_size"), need("num_attention_heads")
        kv_heads = config.get("num_key_value_heads")
        head_dim = config.get("head_dim")
        if head_dim is None and heads >= 1:
            if hidden % heads:
                raise ConfigError(f"{path}: hidden_size={hidden} is no multiple of num_attention_heads={heads}")
            head_dim = hidden // heads
        name = str(config.get("name_or_path") or config.get("_name_or_path") or path.parent.name)
        return cls(
            name=" ".join(name.split()) or "model",  # errors that quote it stay on one line
            n_layers=need("num_hidden_layers"),
            n_q_heads=heads,
            n_kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,  # type: ignore[arg-type]
            hidden_size=hidden,
            intermediate_size=need("intermediate_size"),
            vocab_size=need("vocab_size"),
            dtype=dtype or str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
            tied_embedding=bool(config.get("tie_word_embeddings", False)),
        )

    @classmethod
    def resolve(cls, name_or_path: str) -> ModelShape:
        """A preset name, a config.json, or a directory with one."""
        if name_or_path in PRESETS:
            return PRESETS[name_or_path]
        if Path(name_or_path).exists():
            return cls.from_hf_config(name_or_path)
        return cls.preset(name_or_path)


_SIZES = ("hidden_size", "intermediate_size", "vocab_size")
PRESETS: dict[str, ModelShape] = {
    s.name: s
    for s in (
        ModelShape("smollm2-135m", 30, 9, 3, 64, 576, 1536, 49152, tied_embedding=True),
        ModelShape("nosa-1b", 28, 16, 2, 128, 2048, 6144, 73448, assumed=_SIZES),
        ModelShape("nosa-3b", 32, 32, 2, 128, 2560, 10240, 73448, assumed=_SIZES),
        ModelShape("nosa-8b", 32, 32, 2, 128, 4096, 16384, 73448, assumed=_SIZES),
        ModelShape("llama-3-8b", 32, 32, 8, 128, 4096, 14336, 128256),
    )
}
