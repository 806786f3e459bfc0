"""Small models, budgets and texts that the training tests share."""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers
import torch

from nosa_sys.model_shape import ModelShape
from nosa_sys.models.llama import LlamaModel
from nosa_sys.models.random import random_model
from nosa_sys.models.tokenizer import Tokenizer
from nosa_sys.sparse_config import SparseConfig

VOCAB = 64
SHAPE = ModelShape("tiny", 2, 4, 2, 8, 24, 40, VOCAB, dtype="float32", tied_embedding=True)
# 16-token blocks, k = 5: 3 forced, 1 query-aware, 1 by beta; sparse from 81 tokens on
SPARSE = SparseConfig(16, 16, 8, topk=5, init_blocks=1, window_size=16, select_blocks=2)


def tiny(dtype: str = "float32", head: str = "ed_dma", seed: int = 0) -> LlamaModel:
    return random_model(SHAPE, seed, dtype, head=head)


def tokens(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(seed))


class ByteTokenizer(Tokenizer):
    """Character c is token ord(c) modulo 64."""

    def __init__(self) -> None:
        super().__init__(tokenizers.Tokenizer(tokenizers.models.BPE()), eos_ids=(VOCAB - 1,))

    def encode(self, text: str, special: bool = False, *, begin: bool = True) -> list[int]:
        return [ord(c) % VOCAB for c in text]

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        return "".join(chr(64 + i) for i in ids)


class TextTokenizer(Tokenizer):
    """A token a character, and back."""

    def __init__(self) -> None:
        super().__init__(tokenizers.Tokenizer(tokenizers.models.BPE()), eos_ids=(0,))

    def encode(self, text: str, special: bool = False, *, begin: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        return "".join(map(chr, ids))
