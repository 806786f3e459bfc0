"""Tokenizer: text to ids and back, chat templates, and streaming decode that never splits a character."""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from nosa_sys.errors import CheckpointError, ConfigError, NosaError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A ``tokenizers`` tokenizer with what generation needs: ``eos_ids``, ``vocab_size`` and the chat template.

    ``special_tokens`` maps template variables (bos_token, eos_token, ...) to their text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Sequence[int] = (),
        chat_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self.eos_ids = tuple(eos_ids)
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        self._added = backend.get_added_tokens_decoder()
        self._byte_of = _byte_level_alphabet() if isinstance(backend.decoder, decoders.ByteLevel) else None

    @classmethod
    def from_json(cls, text: str, settings: dict[str, Any], source: Path) -> Tokenizer:
        """A tokenizer out of tokenizer.json text and the other constructor arguments; ``source`` names errors."""
        with _one_line(CheckpointError, f"{source} is no valid tokenizer"):
            backend = tokenizers.Tokenizer.from_str(text)
        # settings of the training run that a file may carry: they would cut or fill up prompts in silence
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, **settings)

    @classmethod
    def from_directory(cls, directory: Path, eos_ids: Sequence[int] = ()) -> Tokenizer | None:
        """The tokenizer beside a checkpoint, None when there is no tokenizer.json.

        Stop ids come from ``eos_ids``, else from the eos_token of tokenizer_config.json. The chat template comes
        from chat_template.jinja, else from tokenizer_config.json.
        """
        path = directory / "tokenizer.json"
        if not path.exists():
            return None
        config = _read_object(directory / "tokenizer_config.json")
        template = config.get("chat_template")
        if isinstance(template, list):
            entries = [entry for entry in template if isinstance(entry, dict)]
            template = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
        if (directory / "chat_template.jinja").exists():
            template = _read_text(directory / "chat_template.jinja")
        special = {}
        for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
            token = config.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                special[key] = token
        settings = {"chat_template": template if isinstance(template, str) else None, "special_tokens": special}
        made = cls.from_json(_read_text(path), settings, path)
        stop = made.token_id(special["eos_token"]) if "eos_token" in special else None
        made.eos_ids = tuple(eos_ids) or (() if stop is None else (stop,))
        return made

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json; ``from_directory`` reads them back (stop ids come from the
        model's config)."""
        (directory / "tokenizer.json").write_text(self._backend.to_str(), encoding="utf-8")
        config = {"chat_template": self.chat_template, **self.special_tokens}
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def sha256(self) -> str:
        """Of the whole tokenizer: equal digests encode a text equally."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()

    def token_id(self, token: str) -> int | None:
        """Id of one token's own text, None when the vocabulary lacks it."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, special: bool = False, *, begin: bool = True) -> list[int]:
        """Ids of ``text``. ``special`` reads control tokens written in it (such as <|im_end|>) as such; by
        default they are plain text, so that a document cannot end its own turn.

        ``begin`` adds what the checkpoint puts before a text (a BOS in Llama 3, nothing in SmolLM2).
        """
        self._backend.encode_special_tokens = not special
        with _one_line(CheckpointError, "the checkpoint's tokenizer cannot encode this text"):
            return list(self._backend.encode(text, add_special_tokens=begin).ids)

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Text of ``ids``; control tokens are left out unless ``special``."""
        return self._backend.decode(list(ids), skip_special_tokens=not special)

    def apply_chat_template(
        self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a conversation ({"role", "content"} each), ready for the assistant's turn.

        The template comes with the checkpoint, so it runs in jinja's sandbox. Control tokens inside a message are
        read as such: check messages of strangers. ConfigError without a template or when it refuses the messages.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt=add_generation_prompt), True, begin=False)

    def render_chat(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The text that ``apply_chat_template`` encodes."""
        if self.chat_template is None:
            raise ConfigError("this tokenizer has no chat template; give the prompt as plain text")
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        with _one_line(ConfigError, "the chat template refuses these messages"):
            return environment.from_string(self.chat_template).render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                raise_exception=refuse,
                **self.special_tokens,
            )

    def token_bytes(self, token: int) -> bytes:
        """The bytes one id stands for: a part of a character is possible. Unknown ids give none."""
        if token in self._added:
            return self._added[token].content.encode()
        text = self._backend.id_to_token(token)
        if text is None:
            return b""
        if self._byte_of is not None and all(char in self._byte_of for char in text):
            return bytes(self._byte_of[char] for char in text)
        byte = BYTE_TOKEN.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace("\u2581", " ").encode()

    def stream(self) -> StreamDecoder:
        """A decoder for one sequence's tokens as they come."""
        return StreamDecoder(self)

    def is_special(self, token: int) -> bool:
        """True for control tokens, which ``decode`` leaves out."""
        return token in self._added and self._added[token].special


class StreamDecoder:
    """Turns tokens into text one by one, holding back bytes until their UTF-8 character is whole.

    For byte-level vocabularies the pieces joined are exactly ``Tokenizer.decode`` of all the tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Text that this token completes, often empty in the middle of a character; control tokens give none."""
        if self._tokenizer.is_special(token):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What is left when the sequence ends: a replacement mark for an unfinished character."""
        return self._decoder.decode(b"", final=True)


@contextmanager
def _one_line(kind: type[NosaError], message: str) -> Iterator[None]:
    """Whatever a checkpoint's own tokenizer or template raises, as one line: a template may fail in any way that
    Python can, and the Rust side raises bare Exception, or a panic that is no Exception at all."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        detail = " ".join(str(error).split()) or type(error).__name__
        raise kind(f"{message}: {detail}") from None


def _byte_level_alphabet() -> dict[str, int]:
    """Inverse of byte-level BPE's alphabet: printable Latin-1 stands for itself, other bytes from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is not UTF-8 text") from None


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        data = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return data
