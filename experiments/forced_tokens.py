"""Tokens that a capture is made to decode, so that runs under other settings see the same text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nosa_sys.engine.sequence import prompt_sha256
from nosa_sys.errors import ConfigError
from nosa_sys.models.tokenizer import Tokenizer
from nosa_sys.traces.schema import TraceMeta

DOCUMENT = "document"
TOKENS_FILE = "tokens.json"


@dataclass(frozen=True)
class ForcedTokens:
    """Where forced tokens come from: ``source`` is document, trace, tokens or text.

    ``rows`` are token ids, one tuple a sequence (one serves all); ``text`` is encoded by the model's own tokenizer;
    ``document`` means what follows the prompt in each prompt file. ``prompt_sha256`` (of a trace's sequences) are the
    prompts that the tokens followed.
    """

    source: str
    rows: tuple[tuple[int, ...], ...] = ()
    text: str = ""
    prompt_sha256: tuple[str, ...] = ()

    def resolve(
        self, documents: Sequence[str], prompts: Sequence[Sequence[int]], new_tokens: int, tokenizer: Tokenizer
    ) -> list[tuple[int, ...]]:
        """Token ids to force, one tuple a prompt, ``new_tokens`` each.

        ``documents`` are the texts whose first tokens are the ``prompts``. ConfigError where there are fewer than
        ``new_tokens`` to force (model output, which differs between settings, would follow), where a trace's prompts
        are others, and where the numbers of sequences differ.
        """
        if self.source == DOCUMENT:
            rows = [tuple(tokenizer.encode(d)[len(p) :]) for d, p in zip(documents, prompts, strict=True)]
        elif self.source == "text":
            rows = [tuple(tokenizer.encode(self.text, begin=False))]
        else:
            rows = list(self.rows)
        if len(rows) not in (1, len(prompts)):
            raise ConfigError(f"force_tokens holds {len(rows)} sequences for {len(prompts)} prompts")
        if self.prompt_sha256 and [prompt_sha256(p) for p in prompts] != list(self.prompt_sha256):
            raise ConfigError(
                "force_tokens names a trace of other prompts; give the same --prompt-file and --max-prompt-tokens, or "
                f"its {TOKENS_FILE} to force its tokens all the same"
            )
        shortest = min(map(len, rows))
        if not shortest:
            raise ConfigError(
                "force_tokens: a sequence without a token forces nothing; give at least one token for each"
            )
        if shortest < new_tokens:
            holder = "shortest sequence" if self.source == "tokens" else self.source
            lower = "--max-prompt-tokens or --max-new-tokens" if self.source == DOCUMENT else "--max-new-tokens"
            raise ConfigError(
                f"force_tokens: the {holder} has {shortest} tokens to force, max_new_tokens={new_tokens}; lower {lower}"
            )
        rows = rows * len(prompts) if len(rows) == 1 else rows
        return [row[:new_tokens] for row in rows]


def forced_facts(forced: ForcedTokens, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What a trace's meta says of them: source, how many, and the SHA-256 of all (little-endian int64)."""
    flat = [token for row in rows for token in row]
    return {"source": forced.source, "tokens": len(flat), "sha256": prompt_sha256(flat)}


def read_force_tokens(given: str | Path) -> ForcedTokens:
    """From the word ``document``, a trace directory, a .json file of token ids, or a text file.

    A .json file holds a list of ids, or a list of such lists as capture leaves in tokens.json. ConfigError for what
    cannot be read, TraceError for a directory that is no trace.
    """
    if given == DOCUMENT:
        return ForcedTokens(DOCUMENT)
    path = Path(given)
    if path.is_dir():
        return _from_trace(path)
    if not path.is_file():
        raise ConfigError(f"no such file: {path}; give {DOCUMENT!r}, a trace directory, a .json of token ids or a text")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    return ForcedTokens("text", text=text) if path.suffix != ".json" else ForcedTokens("tokens", _rows(path, text))


def _from_trace(directory: Path) -> ForcedTokens:
    meta = TraceMeta.load(directory)
    path = directory / TOKENS_FILE
    if not path.is_file():
        raise ConfigError(f"{directory} has no {TOKENS_FILE}: only traces of nosa capture keep their tokens")
    prompts = tuple(s.prompt_sha256 for s in sorted(meta.sequences, key=lambda s: s.id))
    return ForcedTokens("trace", _rows(path, path.read_text(encoding="utf-8")), prompt_sha256=prompts)


def _rows(path: Path, text: str) -> tuple[tuple[int, ...], ...]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    rows = data if isinstance(data, list) and all(isinstance(row, list) for row in data) else [data]
    for row in rows:
        if not isinstance(row, list) or not all(isinstance(t, int) and not isinstance(t, bool) for t in row):
            raise ConfigError(f"{path} must hold a list of token ids, or a list of such lists")
        if wrong := [t for t in row if not 0 <= t < 2**31]:
            raise ConfigError(f"{path} holds {str(wrong[0])[:40]}, which is no token id: they lie in [0, 2^31)")
    return tuple(tuple(row) for row in rows)
