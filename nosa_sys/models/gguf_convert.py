"""GGUF to named float32 tensors, config and tokenizer: the one place that needs the ``gguf`` package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nosa_sys.errors import CheckpointError, ConfigError
from nosa_sys.model_shape import ModelShape
from nosa_sys.models.config import LlamaConfig, RopeScaling
from nosa_sys.models.gguf_header import check_metadata_sizes
from nosa_sys.models.gguf_tokenizer import tokenizer_json, tokenizer_settings
from nosa_sys.models.weights import EMBEDDING, FINAL_NORM, LM_HEAD, base_tensors

if TYPE_CHECKING:
    from gguf import GGUFReader

GGUF_NAMES = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", LM_HEAD: "output.weight"}
GGUF_LAYER_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GgufModel:
    """One opened GGUF of the llama architecture: ``config``, ``tokenizer_json``, ``tokenizer_settings``, tensors.

    Raises CheckpointError naming the file when it is truncated, of another architecture, or lacks a key.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self._reader = _open(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.config = self._read_config(name)
        tokens = {key: self.value(f"tokenizer.ggml.{key}") for key in ("model", "tokens", "merges", "token_type")}
        pre = self.value("tokenizer.ggml.pre", "default")
        try:
            self.tokenizer_json = tokenizer_json(tokens, str(pre))
            self.tokenizer_settings = tokenizer_settings(
                tokens["tokens"],
                eos_ids=self.config.eos_ids,
                bos_id=self.value("tokenizer.ggml.bos_token_id", None),
                chat_template=self.value("tokenizer.chat_template", None),
            )
        except ConfigError as error:
            raise CheckpointError(f"{path}: {error}") from None

    def value(self, key: str, *default: Any) -> Any:
        """One metadata value as plain Python; CheckpointError when it is absent and there is no default."""
        field = self._reader.fields.get(key)
        if field is not None:
            try:
                return field.contents()
            except UnicodeDecodeError:
                raise CheckpointError(f"{self.path}: metadata key {key} is not UTF-8 text") from None
        if default:
            return default[0]
        raise CheckpointError(f"{self.path}: metadata key {key} is missing")

    def _read_config(self, name: str) -> LlamaConfig:
        architecture = self.value("general.architecture")
        if architecture != "llama":
            raise CheckpointError(f"{self.path}: architecture {architecture!r} is not supported, only llama is")
        if "rope_freqs.weight" in self._tensors:
            raise CheckpointError(
                f"{self.path}: tensor rope_freqs.weight (llama3 rotary scaling) is not read from GGUF; "
                "use the safetensors checkpoint"
            )
        hidden, q_heads = self.value("llama.embedding_length"), self.value("llama.attention.head_count")
        scaling = self.value("llama.rope.scaling.type", "none")
        factor = self.value("llama.rope.scaling.factor", 1.0)
        try:
            shape = ModelShape(
                name=name,
                n_layers=self.value("llama.block_count"),
                n_q_heads=q_heads,
                n_kv_heads=self.value("llama.attention.head_count_kv", q_heads),
                head_dim=self.value("llama.attention.key_length", hidden // max(1, q_heads)),
                hidden_size=hidden,
                intermediate_size=self.value("llama.feed_forward_length"),
                vocab_size=len(self.value("tokenizer.ggml.tokens")),
                dtype="float32",
                tied_embedding="output.weight" not in self._tensors,
            )
            eos = self.value("tokenizer.ggml.eos_token_id", None)
            return LlamaConfig(
                shape,
                rope_theta=self.value("llama.rope.freq_base", 10000.0),
                rope_scaling=RopeScaling() if scaling == "none" else RopeScaling(scaling, {"factor": factor}),
                rms_norm_eps=self.value("llama.attention.layer_norm_rms_epsilon"),
                max_positions=self.value("llama.context_length"),
                eos_ids=() if eos is None else (eos,),
            )
        except (ConfigError, TypeError) as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """(checkpoint name, float32 array) of every tensor, dequantised, q and k rows back in the usual order."""
        shape = self.config.shape
        for name, expected in base_tensors(shape):
            array = self._dequantised(gguf_name(name), expected)
            if name.endswith("q_proj.weight"):
                array = unpermute(array, shape.n_q_heads)
            elif name.endswith("k_proj.weight"):
                array = unpermute(array, shape.n_kv_heads)
            yield name, np.ascontiguousarray(array, dtype=np.float32)

    def _dequantised(self, name: str, expected: tuple[int, ...]) -> np.ndarray:
        from gguf.quants import dequantize

        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.path}: tensor {name} is missing (expected shape {list(expected)})")
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if shape != expected:
            raise CheckpointError(
                f"{self.path}: tensor {name} has shape {list(shape)}, the metadata ask for {list(expected)}"
            )
        try:
            return dequantize(tensor.data, tensor.tensor_type).reshape(expected)
        except NotImplementedError as error:
            raise CheckpointError(f"{self.path}: tensor {name} cannot be dequantised: {error}") from None


def gguf_name(name: str) -> str:
    """GGUF's name of a checkpoint tensor.

    >>> gguf_name("model.layers.3.mlp.up_proj.weight")
    'blk.3.ffn_up.weight'
    """
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{GGUF_LAYER_PARTS[part]}.weight"


def unpermute(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Undo GGUF's row order of a q or k matrix [heads*D, hidden]: per head, interleaved pairs back to two halves.

    >>> unpermute(np.array([[0], [2], [1], [3]]), 1).ravel().tolist()
    [0, 1, 2, 3]
    """
    half = rows.shape[0] // n_heads // 2
    return rows.reshape(n_heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _open(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise CheckpointError(f"reading {path} needs the gguf package: pip install gguf") from None
    check_metadata_sizes(path)
    try:
        return GGUFReader(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, IndexError, OverflowError, MemoryError) as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is no whole GGUF file: {detail}") from None
