"""One sequence's life: what was asked for, how far it is, and what is saved of it."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable
from collections.abc import Sequence as TokenList
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from torch import Tensor

from nosa_sys.engine.sampling import SamplingParams
from nosa_sys.errors import ConfigError
from nosa_sys.traces.schema import SequenceInfo

FINISH_LENGTH, FINISH_EOS = "length", "eos"


@dataclass(frozen=True)
class TokenEvent:
    """A new token of a sequence: ``position`` is the token's own (0-based); ``reason`` is "length" or "eos" at the
    last one, else empty."""

    sequence: int
    token: int
    position: int
    finished: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Request:
    """What a caller asked for. ``force_tokens`` replace the first new tokens (teacher forcing)."""

    prompt_tokens: int
    max_new_tokens: int
    sampling: SamplingParams
    eos_ids: frozenset[int]
    force_tokens: tuple[int, ...] = ()


def make_request(
    prompt: TokenList[int],
    max_new_tokens: int,
    sampling: SamplingParams,
    eos_ids: Iterable[int],
    force_tokens: TokenList[int] | None,
    *,
    vocab_size: int,
) -> tuple[Request, list[int]]:
    """(request, prompt tokens). ConfigError for an empty prompt, no new token, or what is no id of the vocabulary."""
    try:
        tokens = [operator.index(t) for t in prompt]
        forced = tuple(operator.index(t) for t in (() if force_tokens is None else force_tokens))
    except TypeError:
        raise ConfigError("prompt and force_tokens must be token ids, whole numbers") from None
    if not tokens:
        raise ConfigError("the prompt is empty; give at least one token (a BOS token will do)")
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} must be >= 1")
    for name, ids in (("prompt", tokens), ("force_tokens", forced)):
        bad = [t for t in ids if not 0 <= t < vocab_size]
        if bad:
            raise ConfigError(f"{name}: token {bad[0]} is outside the vocabulary 0..{vocab_size - 1}")
    return Request(len(tokens), max_new_tokens, sampling, frozenset(eos_ids), forced), tokens


@dataclass(frozen=True)
class SavedKV:
    """KV of the first ``n_tokens`` tokens, one entry a layer.

    ``blocks`` [finished block, kv_head, 2, block, D]; ``partial`` [kv_head, 2, written rows, D]: only rows that were
    written, so a block whose last token is still to come is seen to be partial; ``betas`` [kv_head, token];
    ``key_means`` [kv_head, window, D]; ``beta_means`` [kv_head, window].
    """

    n_tokens: int
    blocks: tuple[Tensor, ...]
    partial: tuple[Tensor, ...]
    betas: tuple[Tensor, ...]
    key_means: tuple[Tensor, ...]
    beta_means: tuple[Tensor, ...]

    @property
    def n_partial_rows(self) -> int:
        """Written rows of the unfinished last block; 0 when the context ends on a block edge."""
        return self.partial[0].shape[2]


@dataclass(frozen=True)
class SequenceState:
    """A saved sequence: resume it in an engine with the same model and selection settings (``settings``)."""

    request: Request
    tokens: tuple[int, ...]
    n_generated: int
    settings: dict[str, Any]
    kv: SavedKV | None


@dataclass
class Sequence:
    """A live sequence. ``tokens`` are prompt and new ones; the first ``n_cached`` have their KV in the tiers."""

    id: int
    request: Request
    tokens: list[int]
    generator: np.random.Generator
    n_generated: int = 0
    n_cached: int = 0
    lane: int = -1
    cold: bool = True
    pages: list[int] = field(default_factory=list)
    reserved_pages: int = 0
    restored: SavedKV | None = None
    synthetic_seed: int | None = None
    _n_drawn: int = 0

    @property
    def n_prefill(self) -> int:
        """Tokens to prefill: all known ones but the last, which runs as the first decode step."""
        return len(self.tokens) - 1

    @property
    def max_stored_tokens(self) -> int:
        """KV rows at the end of the sequence's life: the last new token is never consumed."""
        return len(self.tokens) + self.request.max_new_tokens - self.n_generated - 1

    @property
    def info(self) -> SequenceInfo:
        """What a trace says of the sequence: the tokens known so far are its prompt."""
        return SequenceInfo(self.id, len(self.tokens), prompt_sha256(self.tokens))

    def token_at(self, position: int) -> int:
        """The token to consume at ``position``; -1: the one that the step in flight will sample."""
        if position < len(self.tokens):
            return self.tokens[position]
        forced = self.request.force_tokens
        return forced[self.n_generated] if self.n_generated < len(forced) else -1

    @property
    def may_end_soon(self) -> bool:
        """Whether the next token could be the last one, or the one after it is."""
        sampled = self.n_generated >= len(self.request.force_tokens)
        return self.n_generated + 2 >= self.request.max_new_tokens or (sampled and bool(self.request.eos_ids))

    def draw(self) -> float:
        """The uniform number of the step that consumes token ``n_cached``: the n-th new token takes the n-th number of
        the sequence's own generator, however often its step is tried or the sequence saved and resumed."""
        index = self.n_cached + 1 - self.request.prompt_tokens
        cast(np.random.PCG64, self.generator.bit_generator).advance(index - self._n_drawn)
        self._n_drawn = index + 1
        return self.generator.random()

    def accept(self, sampled: int) -> TokenEvent:
        """Take the next token (a forced one where there is one) and say whether the sequence ends with it."""
        request = self.request
        forced = self.n_generated < len(request.force_tokens)
        token = request.force_tokens[self.n_generated] if forced else sampled
        self.tokens.append(token)
        self.n_generated += 1
        reason = ""
        if not forced and token in request.eos_ids:
            reason = FINISH_EOS
        elif self.n_generated >= request.max_new_tokens:
            reason = FINISH_LENGTH
        return TokenEvent(self.id, token, len(self.tokens) - 1, bool(reason), reason)


def prompt_sha256(tokens: TokenList[int]) -> str:
    """SHA-256 of the token ids as little-endian int64."""
    return hashlib.sha256(np.asarray(tokens, dtype="<i8").tobytes()).hexdigest()
