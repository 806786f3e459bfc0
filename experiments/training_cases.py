"""A tiny model, budgets, texts and runs on which training is checked: by tests, and by ``training_checks``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from nosa_sys.model_shape import ModelShape
from nosa_sys.models.llama import LlamaModel
from nosa_sys.models.load import LoadedModel
from nosa_sys.models.random import random_model
from nosa_sys.models.tokenizer import Tokenizer
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.training.loop import Trainer
from nosa_sys.training.recipe import TrainSettings
from nosa_sys.training.text_sources import DocumentTexts, TextSource
from nosa_sys.training.texts import Document

VOCAB = 64
SHAPE = ModelShape("tiny", 2, 4, 2, 8, 24, 40, VOCAB, dtype="float32", tied_embedding=True)
# 16-token blocks, k = 5: 3 forced, 1 query-aware, 1 by beta; sparse from 81 tokens on
SPARSE = SparseConfig(16, 16, 8, topk=5, init_blocks=1, window_size=16, select_blocks=2)


def tiny(dtype: str = "float32", head: str = "ed_dma", seed: int = 0) -> LlamaModel:
    """Two random layers of 4 query and 2 KV heads of 8 channels."""
    return random_model(SHAPE, seed, dtype, head=head)


def tokens(n: int, seed: int = 0) -> Tensor:
    """n random token ids."""
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(seed))


class ByteTokenizer(Tokenizer):
    """Character c is token ord(c) modulo 64."""

    def __init__(self) -> None:
        super().__init__(tokenizers.Tokenizer(tokenizers.models.BPE()), eos_ids=(VOCAB - 1,))

    def encode(self, text: str, special: bool = False, *, begin: bool = True) -> list[int]:
        return [ord(c) % VOCAB for c in text]

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        return "".join(chr(64 + i) for i in ids)


def documents() -> list[Document]:
    """Repetitive texts, so that there is something to learn from far away."""
    words = ["alpha", "beta", "gamma", "delta", "omega"]
    return [Document(f"{i}.txt", " ".join(words[(i * n + n * n) % 5] for n in range(120))) for i in range(12)]


def settings(**changes: Any) -> TrainSettings:
    """Eight steps of two sequences of 112 tokens, with ``changes``."""
    small = {"length": 112, "batch": 2, "steps": 8, "streams": 3, "held_out": 0.3, "held_out_sequences": 1}
    rest = {"evaluate_every": 4, "checkpoint_every": 3, "warmup_steps": 2, "rank": 2}
    return TrainSettings(name="t", sparse=SPARSE, **{**small, **rest, **changes})


def trainer(directory: Path, *, resume: bool = False, texts: TextSource | None = None, **changes: Any) -> Trainer:
    """A run of the tiny model in ``directory``."""
    chosen = settings(**changes)
    texts = texts or DocumentTexts(documents(), chosen.held_out)
    loaded = LoadedModel(tiny(head=chosen.head), "tiny", [], ByteTokenizer())
    return Trainer(chosen, texts, directory, resume=resume, loaded=loaded)
