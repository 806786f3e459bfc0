"""Low-rank changes of the base weights: named factors in an adapter file, added to a checkpoint as it is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from nosa_sys.errors import CheckpointError
from nosa_sys.model_shape import ModelShape
from nosa_sys.models.safetensors_reader import CheckpointTensors
from nosa_sys.models.weights import layer_name

# Products of one layer that share an input, and the checkpoint's matrices whose rows they hold in this order.
FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def factor_name(layer: int, product: str, factor: str) -> str:
    """Name of factor ``a`` [rank, in] or ``b`` [out, rank]: the fused matrix changes by b @ a.

    >>> factor_name(3, "qkv", "a")
    'model.layers.3.low_rank.qkv.a'
    """
    return layer_name(layer, f"low_rank.{product}.{factor}")


def fused_sizes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """(out, in) of each fused matrix of a layer."""
    q_rows, kv_rows = shape.n_q_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    return {
        "qkv": (q_rows + 2 * kv_rows, hidden),
        "o": (hidden, q_rows),
        "gate_up": (2 * ffn, hidden),
        "down": (hidden, ffn),
    }


def factor_tensors(shape: ModelShape, rank: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """(name, shape) of every factor of a model."""
    for layer in range(shape.n_layers):
        for product, (rows, columns) in fused_sizes(shape).items():
            yield factor_name(layer, product, "a"), (rank, columns)
            yield factor_name(layer, product, "b"), (rows, rank)


def rank_of(adapter: CheckpointTensors) -> int:
    """Rank of an adapter's change of the base weights; 0 when it holds none."""
    first = adapter.entries.get(factor_name(0, "qkv", "a"))
    return first.shape[0] if first is not None and first.shape else 0


def add_low_rank(tensors: dict[str, Tensor], adapter: CheckpointTensors, shape: ModelShape) -> int:
    """Add an adapter's b @ a to the matrices of ``tensors``, in fp32; returns the rank, 0 without any change.

    Raises CheckpointError for a factor that is missing or of another shape."""
    rank = rank_of(adapter)
    if rank == 0:
        if any(".low_rank." in name for name in adapter.entries):
            raise CheckpointError(f"{adapter.source}: tensor {factor_name(0, 'qkv', 'a')} is missing")
        return 0
    factors = {name: adapter.take(name, size) for name, size in factor_tensors(shape, rank)}
    for layer in range(shape.n_layers):
        for product, parts in FUSED.items():
            a, b = (factors[factor_name(layer, product, factor)].float() for factor in "ab")
            names = [layer_name(layer, f"{part}.weight") for part in parts]
            for name, change in zip(names, (b @ a).split([len(tensors[n]) for n in names]), strict=True):
                tensors[name] = tensors[name] + change.to(tensors[name].dtype)
    return rank
