"""Small models, budgets and texts that the training tests share."""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers

from nosa_sys.experiments.training_cases import SHAPE, SPARSE, VOCAB, ByteTokenizer, tiny, tokens
from nosa_sys.models.tokenizer import Tokenizer

__all__ = ["SHAPE", "SPARSE", "VOCAB", "ByteTokenizer", "TextTokenizer", "tiny", "tokens"]


class TextTokenizer(Tokenizer):
    """A token a character, and back."""

    def __init__(self) -> None:
        super().__init__(tokenizers.Tokenizer(tokenizers.models.BPE()), eos_ids=(0,))

    def encode(self, text: str, special: bool = False, *, begin: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        return "".join(map(chr, ids))
