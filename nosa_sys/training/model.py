"""TrainableModel: a LlamaModel whose eviction head, whole base or low-rank base change learns from next-token loss."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nosa_sys.errors import ConfigError, NumericsError
from nosa_sys.kernels.block_selection import raise_selection_errors
from nosa_sys.kernels.eviction_head.reference import split_qkv_and_beta
from nosa_sys.methods import get_method
from nosa_sys.models.eviction_head_weights import fresh_head
from nosa_sys.models.llama import LlamaLayer, LlamaModel
from nosa_sys.models.low_rank import factor_name, fused_sizes
from nosa_sys.models.rope import rotate
from nosa_sys.models.weights import layer_name
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.training.attention import ATTENTIONS, attend, select
from nosa_sys.training.recipe import TRAINED

_BASE_PARTS = ("qkv", "o", "gate_up", "down", "attention_norm", "mlp_norm")
_LOSS_TOKENS = 2048  # logits are made for so many tokens at once: a vocabulary is wide


class TrainableModel:
    """One model in training: the forward pass of the engine's prefill, with gradients.

    ``trained``: head (the base is frozen), all, or low_rank (b @ a of rank ``rank`` is added to each frozen fused
    matrix). ``method`` decides what attention sees; ``base.head`` is ed_dma, dma or none. Attributes: ``base``, whose
    tensors are the parameters themselves, ``head_parameters`` and ``weight_parameters`` by name, A and delta fp32.
    ``attention`` names an entry of ``training.attention.ATTENTIONS``; ``recompute`` makes the activations of a layer
    again in the backward pass instead of keeping them.

    Raises ConfigError for an unknown name, a base that is not in fp32 or fp64, or nothing to train.
    """

    def __init__(
        self,
        base: LlamaModel,
        sparse: SparseConfig,
        *,
        method: str = "nosa",
        trained: str = "head",
        rank: int = 8,
        attention: str = "sdpa",
        recompute: bool = True,
        seed: int = 0,
    ) -> None:
        if trained not in TRAINED:
            raise ConfigError(f"trained={trained!r} must be one of {', '.join(TRAINED)}")
        if attention not in ATTENTIONS:
            raise ConfigError(f"attention={attention!r} must be one of {', '.join(ATTENTIONS)}")
        if base.dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"dtype={base.shape.dtype} holds no master weights; load the model in float32")
        self.base, self.sparse, self.method = base, sparse, get_method(method)
        self.method.check(sparse)
        self.trained, self.rank, self._attention, self._recompute = trained, rank, attention, recompute
        self._unchecked: list[tuple[int, Tensor]] = []  # (layer, errors of its selection), while a GPU works on them
        self.has_head = base.head != "none" and self.method.uses_beta
        if trained == "head" and not self.has_head:
            raise ConfigError(f"head={base.head} with method {method} leaves no head to train; use trained all")
        self._factors: dict[str, Tensor] = {}
        self.head_parameters: dict[str, Tensor] = {}
        self.weight_parameters: dict[str, Tensor] = {}
        for name, holder, field in self._places():
            of_head = field in ("A", "delta")
            learns = self.has_head if of_head else trained == "all"
            tensor = getattr(holder, field).detach().clone().requires_grad_(learns)
            setattr(holder, field, tensor)
            if learns:
                (self.head_parameters if of_head else self.weight_parameters)[name] = tensor
        if base.shape.tied_embedding:
            base.lm_head = base.embedding
        if trained == "low_rank":
            self._add_factors(seed)

    def _places(self) -> Iterator[tuple[str, LlamaModel | LlamaLayer, str]]:
        """(name, holder, field) of every tensor of the base."""
        yield "embedding", self.base, "embedding"
        yield "final_norm", self.base, "final_norm"
        if not self.base.shape.tied_embedding:
            yield "lm_head", self.base, "lm_head"
        for index, layer in enumerate(self.base.layers):
            for field in _BASE_PARTS:
                yield layer_name(index, field), layer, field
            yield layer_name(index, "self_attn.A"), layer, "A"
            yield layer_name(index, "self_attn.delta.weight"), layer, "delta"

    def _add_factors(self, seed: int) -> None:
        """a ~ N(0, 1 / in) and b = 0: the change is zero at first, and b moves first."""
        if self.rank < 1:
            raise ConfigError(f"rank={self.rank} must be >= 1")
        generator = torch.Generator().manual_seed(seed)
        for layer in range(self.base.n_layers):
            for product, (rows, columns) in fused_sizes(self.base.shape).items():
                a = torch.randn(self.rank, columns, generator=generator) * columns**-0.5
                for factor, start in (("a", a), ("b", torch.zeros(rows, self.rank))):
                    tensor = start.to(self.base.device, self.base.dtype).requires_grad_()
                    self._factors[factor_name(layer, product, factor)] = tensor
        self.weight_parameters = dict(self._factors)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Everything that learns, by name."""
        return self.head_parameters | self.weight_parameters

    @property
    def factors(self) -> dict[str, Tensor]:
        """The low-rank factors by their names in an adapter file; empty unless trained is low_rank."""
        return self._factors

    def frozen(self) -> dict[str, Tensor]:
        """Everything that does not learn, by name."""
        return {name: getattr(holder, field) for name, holder, field in self._places() if name not in self.parameters}

    @torch.no_grad()
    def start_head(self, seed: int, A: float = 1.0) -> None:
        """A fresh head: the same A everywhere and delta ~ N(0, 0.02). Unlike A = 0 it lets delta learn at once."""
        fresh = fresh_head(self.base.shape, seed)
        for index, layer in enumerate(self.base.layers):
            layer.A.fill_(A)
            layer.delta.copy_(fresh[layer_name(index, "self_attn.delta.weight")])

    # ---- the forward pass
    def loss(self, tokens: Tensor) -> Tensor:
        """Mean next-token loss in nats of one sequence, tokens [T] integer, T >= 2. On a GPU nothing waits for it;
        ``check_selections`` tells of NaN scores."""
        hidden, targets = self._hidden(tokens)[:-1], tokens[1:]
        total = torch.zeros((), dtype=self.base.acc_dtype, device=self.base.device)
        for start in range(0, len(targets), _LOSS_TOKENS):
            part = slice(start, start + _LOSS_TOKENS)
            total = total + self._run(self._summed_loss, hidden[part], targets[part])
        return total / len(targets)

    def _summed_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self.base.logits(hidden).to(self.base.acc_dtype)
        return F.cross_entropy(logits, targets, reduction="sum")

    def logits(self, tokens: Tensor) -> Tensor:
        """tokens [T] -> [T, vocab]."""
        return self.base.logits(self._hidden(tokens))

    def check_selections(self) -> None:
        """Raise NumericsError, naming layer, position, KV head and block, when a selection since the last call met NaN
        scores. Waits for the device once."""
        unchecked, self._unchecked = self._unchecked, []
        if unchecked and int(torch.stack([errors.amax() for _, errors in unchecked]).amax()) >= 0:
            for layer, errors in unchecked:
                first = self.sparse.topk_tokens  # before it everything is selected
                raise_selection_errors(errors, first_row=first, where=f"layer {layer}, ")

    def _run(self, part: Callable[..., Tensor], *arguments: Any) -> Tensor:
        return checkpoint(part, *arguments, use_reentrant=False) if self._recompute else part(*arguments)

    def _hidden(self, tokens: Tensor) -> Tensor:
        turn = self.base.rotation(torch.arange(len(tokens), device=self.base.device))
        x = self.base.embed(tokens)
        for index in range(self.base.n_layers):
            # the selection of the first pass serves the second: it has no gradient
            x = self._run(self._layer, index, x, turn, [])
        return x

    def _layer(self, index: int, x: Tensor, turn: tuple[Tensor, Tensor], kept: list[Tensor | None]) -> Tensor:
        base, weights, shape = self.base, self.base.layers[index], self.base.shape
        qkv = self._product(index, "qkv", self._norm(x, weights.attention_norm))
        with torch.autocast(x.device.type, enabled=False):  # betas stay fp32
            q, k, v, beta = split_qkv_and_beta(
                qkv, weights.A, weights.delta, shape.n_q_heads, shape.n_kv_heads, shape.head_dim, base.head
            )
            q, k = rotate(q, *turn), rotate(k, *turn)
            if not kept:
                kept.append(self._select(index, q, k, beta))
            bias = beta if self.has_head else None
            out = attend(self._attention, q, k, v, bias, kept[0], self.sparse.block_size)
        x = x + self._product(index, "o", out.flatten(1))
        gate, up = self._product(index, "gate_up", self._norm(x, weights.mlp_norm)).chunk(2, dim=-1)
        return x + self._product(index, "down", F.silu(gate) * up)

    def _select(self, layer: int, q: Tensor, k: Tensor, beta: Tensor) -> Tensor | None:
        try:
            selected = select(q, k, beta, self.sparse, self.method)
        except NumericsError as error:
            raise NumericsError(f"layer {layer}, training, row = position: {error}") from None
        if selected is None:
            return None
        if selected.errors is not None and len(selected.errors):
            self._unchecked.append((layer, selected.errors))
        return selected.block_ids

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.base.shape.hidden_size,), weight, self.base.config.rms_norm_eps)

    def _product(self, layer: int, product: str, x: Tensor) -> Tensor:
        out = F.linear(x, getattr(self.base.layers[layer], product))
        if self._factors:
            a, b = (self._factors[factor_name(layer, product, factor)] for factor in "ab")
            out = out + F.linear(F.linear(x, a), b)
        return out

    # ---- for the engine
    @torch.no_grad()
    def engine_model(self) -> LlamaModel:
        """The model as an engine runs it: low-rank changes added; other tensors are shared, so it follows training."""
        model = copy.copy(self.base)
        model.layers = []
        for index, layer in enumerate(self.base.layers):
            tensors = {field.name: getattr(layer, field.name).detach() for field in dataclasses.fields(layer)}
            for product in fused_sizes(model.shape) if self._factors else ():
                a, b = (self._factors[factor_name(index, product, factor)] for factor in "ab")
                tensors[product] = tensors[product] + b @ a
            model.layers.append(LlamaLayer(**tensors))
        for field in ("embedding", "final_norm", "lm_head"):
            setattr(model, field, getattr(model, field).detach())
        return model
