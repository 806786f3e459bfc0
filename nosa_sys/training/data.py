"""Packed long sequences: documents end to end with EOS between them, in a seeded order that can be resumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nosa_sys.errors import ConfigError
from nosa_sys.models.tokenizer import Tokenizer
from nosa_sys.training.texts import Document


class PackedSequences:
    """Endless sequences of ``length`` tokens out of ``documents``.

    The documents are dealt to ``streams`` readers, and sequence n comes from reader n modulo streams, so that
    neighbouring sequences are of different documents. A reader packs its documents in an order that is drawn anew for
    every pass, each followed by ``eos``; a sequence begins where the reader's last one ended. ``state`` after n
    sequences and ``restore`` give exactly sequence n again. Documents are encoded when a reader comes to them.

    Raises ConfigError for a length below 2, or fewer documents than readers.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        tokenizer: Tokenizer,
        *,
        length: int,
        eos: int,
        streams: int = 8,
        seed: int = 0,
    ) -> None:
        if length < 2:
            raise ConfigError(f"length={length} must be >= 2 tokens")
        if not 1 <= streams <= len(documents):
            raise ConfigError(f"streams={streams} must lie in [1, {len(documents)}], the number of documents")
        self.length, self.n_drawn = length, 0
        order = np.random.default_rng(seed).permutation(len(documents))
        self._readers = [
            _Reader([documents[i] for i in order[first::streams]], tokenizer, eos, (seed, first + 1))
            for first in range(streams)
        ]

    def next(self) -> NDArray[np.int64]:
        """The next sequence, int64 [length]."""
        reader = self._readers[self.n_drawn % len(self._readers)]
        self.n_drawn += 1
        return reader.take(self.length)

    def state(self) -> dict[str, Any]:
        """Where the reading stands, in JSON values."""
        return {"n_drawn": self.n_drawn, "readers": [reader.place for reader in self._readers]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a ``state`` of the same documents and settings; ConfigError when it cannot be theirs."""
        readers = state.get("readers")
        if readers is None:  # of a token pack, which counts alone
            for _ in range(int(state["n_drawn"])):
                self.next()
            return
        if len(readers) != len(self._readers):
            raise ConfigError(f"the saved position has {len(readers)} streams, this run {len(self._readers)}")
        for reader, place in zip(self._readers, readers, strict=True):
            reader.go_to([int(value) for value in place])
        self.n_drawn = int(state["n_drawn"])


class _Reader:
    """One stream of tokens; ``place`` is [pass, document in its order, token in it]."""

    def __init__(self, documents: list[Document], tokenizer: Tokenizer, eos: int, seed: tuple[int, int]) -> None:
        self._documents, self._tokenizer, self._eos, self._seed = documents, tokenizer, eos, seed
        self.go_to([0, 0, 0])

    def go_to(self, place: list[int]) -> None:
        self.place = list(place)
        self._order = np.random.default_rng((*self._seed, place[0] + 1)).permutation(len(self._documents))
        self._open: NDArray[np.int64] | None = None

    def take(self, n_tokens: int) -> NDArray[np.int64]:
        parts = []
        while n_tokens > 0:
            tokens = self._tokens()
            part = tokens[self.place[2] : self.place[2] + n_tokens]
            parts.append(part)
            n_tokens -= len(part)
            self.place[2] += len(part)
            if self.place[2] == len(tokens):
                self._turn()
        return np.concatenate(parts)

    def _tokens(self) -> NDArray[np.int64]:
        if self._open is None:
            document = self._documents[self._order[self.place[1]]]
            self._open = np.array([*self._tokenizer.encode(document.text), self._eos], dtype=np.int64)
        return self._open

    def _turn(self) -> None:
        """On to the next document, or to the next pass."""
        n_pass, index, _ = self.place
        if index + 1 < len(self._documents):
            self.place, self._open = [n_pass, index + 1, 0], None
        else:
            self.go_to([n_pass + 1, 0, 0])
