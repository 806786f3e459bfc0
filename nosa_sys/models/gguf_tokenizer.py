"""Rebuild a byte-level BPE tokenizer from the vocabulary inside a GGUF."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nosa_sys.errors import ConfigError

CONTROL, USER_DEFINED = 3, 4
# Pre-tokenizers by GGUF name: "smollm" splits every digit off, then GPT-2's byte-level pattern.
PRE_TOKENIZERS = ("smollm", "gpt-2", "gpt2")


def tokenizer_json(tokens: dict[str, Any], pre: str) -> str:
    """tokenizer.json text from GGUF's ``model``, ``tokens``, ``merges`` and ``token_type`` lists.

    Raises ConfigError for another vocabulary kind or an unknown pre-tokenizer: a guess would tokenise wrongly.
    """
    if tokens["model"] != "gpt2" or pre not in PRE_TOKENIZERS:
        raise ConfigError(
            f"tokenizer {tokens['model']!r} with {pre!r} is not supported; known: gpt2 with {', '.join(PRE_TOKENIZERS)}"
        )
    for key, kind in (("tokens", str), ("merges", str), ("token_type", int)):
        if not isinstance(tokens[key], list) or not all(isinstance(value, kind) for value in tokens[key]):
            raise ConfigError(f"tokenizer.ggml.{key} must be a list of {kind.__name__}")
    texts, kinds = tokens["tokens"], tokens["token_type"]
    if len(kinds) != len(texts):
        raise ConfigError(f"token_type has {len(kinds)} entries for {len(texts)} tokens")
    merges = [tuple(merge.split(" ")) for merge in tokens["merges"]]
    vocabulary = {text: index for index, text in enumerate(texts)}
    for merge in merges:
        if len(merge) != 2 or any(part not in vocabulary for part in (*merge, "".join(merge))):
            raise ConfigError(f"merge {' '.join(merge)!r} is not made of tokens")
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    else:
        made.pre_tokenizer = byte_level
    made.decoder = decoders.ByteLevel()
    pairs = list(zip(texts, kinds, strict=True))
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text, k in pairs if k == CONTROL])
    made.add_tokens([AddedToken(text, normalized=False) for text, kind in pairs if kind == USER_DEFINED])
    return made.to_str()


def tokenizer_settings(
    texts: Sequence[str], *, eos_ids: Sequence[int], bos_id: int | None, chat_template: str | None
) -> dict[str, Any]:
    """The other arguments of ``Tokenizer.from_json``, as plain JSON values."""
    special = {}
    for name, token in (("bos_token", bos_id), ("eos_token", eos_ids[0] if eos_ids else None)):
        if token is not None:
            if not isinstance(token, int) or not 0 <= token < len(texts):
                raise ConfigError(f"{name} id {token!r} is outside the vocabulary of {len(texts)}")
            special[name] = texts[token]
    return {"eos_ids": list(eos_ids), "chat_template": chat_template, "special_tokens": special}
