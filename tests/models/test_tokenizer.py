"""Tokenizer against transformers' own of the same GGUF, chat template, and streaming decode."""

from __future__ import annotations

import json
import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys.errors import CheckpointError, ConfigError
from nosa_sys.models.load import LoadedModel, load_model
from nosa_sys.models.smollm2 import find_gguf
from nosa_sys.models.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello world, it's   fine.\n\n def f(x):\n\treturn x",
    "日本語 émoji 🙂👩‍👩‍👧 naïve Ω",
    "abc 1234 x5y 3.14 2026-01-01",
    "a\r\nb\x00c\u00a0d",
    "  leading and trailing  ",
    pydoc_data.topics.topics["assignment"][:20_000],
]
CHAT = [
    {"role": "user", "content": "What is 12 x 12?"},
    {"role": "assistant", "content": "144"},
    {"role": "user", "content": "And 13 x 13? 🙂"},
]


@pytest.fixture(scope="module")
def theirs() -> Any:
    path = find_gguf()
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="module")
def ours(smollm2: LoadedModel) -> Tokenizer:
    return smollm2.tokenizer


@pytest.mark.model
def test_ids_and_text_equal_transformers(ours: Tokenizer, theirs: Any) -> None:
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>"]:
        ids = ours.encode(text, special=True)
        assert ids == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids, special=True) == theirs.decode(ids) == text
    assert ours.vocab_size == len(theirs) == 49152
    assert ours.eos_ids == (theirs.eos_token_id,)


@pytest.mark.model
@pytest.mark.parametrize("generate", [True, False])
def test_chat_equals_transformers(ours: Tokenizer, theirs: Any, generate: bool) -> None:
    expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=generate)
    assert ours.render_chat(CHAT, add_generation_prompt=generate) == expected
    ids = ours.apply_chat_template(CHAT, add_generation_prompt=generate)
    assert ids == theirs(expected, add_special_tokens=False).input_ids


@pytest.mark.model
def test_known_ids(ours: Tokenizer) -> None:
    """Each digit is a token of its own."""
    assert ours.encode("Hello 1234") == [19556, 216, 33, 34, 35, 36]
    assert ours.token_bytes(19556) == b"Hello"
    assert ours.token_bytes(10**9) == b""


@pytest.mark.model
def test_a_document_cannot_end_its_own_turn(ours: Tokenizer) -> None:
    assert ours.encode("<|im_end|>", special=True) == [2]
    plain = ours.encode("<|im_end|>")
    assert 2 not in plain
    assert ours.decode(plain) == "<|im_end|>"
    assert ours.decode([2]) == ""
    assert ours.decode([2], special=True) == "<|im_end|>"


@pytest.mark.model
@given(text=st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cc", "Cs"]), max_size=60))
def test_any_text_survives(ours: Tokenizer, theirs: Any, text: str) -> None:
    """But for some control characters and planes beyond U+3FFFF, whose bytes SmolLM2's vocabulary lacks."""
    ids = ours.encode(text, special=True)
    assert ids == theirs(text, add_special_tokens=False).input_ids
    assert ours.decode(ours.encode(text)) == text


@pytest.mark.model
@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_streamed_pieces_join_to_decode(ours: Tokenizer, ids: list[int]) -> None:
    """Any ids, also those that break UTF-8."""
    stream = ours.stream()
    assert "".join([*map(stream.push, ids), stream.finish()]) == ours.decode(ids)


@pytest.mark.model
def test_stream_never_shows_half_a_character(ours: Tokenizer) -> None:
    text = "naïve 🙂 日本語 👩‍👩‍👧"
    stream = ours.stream()
    pieces = [stream.push(token) for token in ours.encode(text)]
    assert "\ufffd" not in "".join(pieces)
    assert "" in pieces
    assert "".join(pieces) == text
    assert stream.finish() == ""


# ---- tokenizers beside a checkpoint
TINY_TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [
        {
            "id": 3,
            "content": "<s>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [3], "tokens": ["<s>"]}},
    },
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "<unk>": 2, "<s>": 3}, "unk_token": "<unk>"},
}


def write_tokenizer(directory: Path, **config: Any) -> Path:
    (directory / "tokenizer.json").write_text(json.dumps(TINY_TOKENIZER))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_directory_tokenizer(checkpoint: Callable[..., Path]) -> None:
    directory = write_tokenizer(
        checkpoint(eos_token_id=[1, 2]),
        bos_token={"content": "<s>"},
        chat_template=[
            {"name": "default", "template": "{{ bos_token }} a{% for m in messages %} {{ m.content }}{% endfor %}"}
        ],
    )
    tokenizer = load_model(directory).tokenizer
    assert tokenizer.eos_ids == (1, 2)
    assert tokenizer.encode("a b") == [3, 0, 1], "the BOS that the checkpoint asks for comes first"
    assert tokenizer.encode("a b", begin=False) == [0, 1]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "b"}]) == [3, 0, 1]
    (directory / "chat_template.jinja").write_text("b")
    assert load_model(directory).tokenizer.apply_chat_template([]) == [1]


def test_eos_from_the_tokenizer_config(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_tokenizer(tmp_path, eos_token="b"))
    assert tokenizer is not None
    assert tokenizer.eos_ids == (1,)


def test_tokenizer_larger_than_the_model_warns(checkpoint: Callable[..., Path]) -> None:
    def shrink(tensors: dict) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][:3].clone()

    directory = write_tokenizer(checkpoint(change=shrink, vocab_size=3))
    with pytest.warns(UserWarning, match="tokenizer has 4 ids but the model only 3"):
        load_model(directory)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b'{"a":' * 50_000])
def test_broken_tokenizer_files(tmp_path: Path, name: str, content: bytes) -> None:
    (write_tokenizer(tmp_path) / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as caught:
        Tokenizer.from_directory(tmp_path)
    assert "\n" not in str(caught.value)


def test_chat_templates_are_sandboxed_and_may_refuse(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_tokenizer(tmp_path))
    assert tokenizer is not None
    with pytest.raises(ConfigError, match="no chat template"):
        tokenizer.apply_chat_template(CHAT)
    for template in ("{{ raise_exception('roles must alternate') }}", "{{ ''.__class__.__mro__ }}", "{% if %}"):
        tokenizer.chat_template = template
        with pytest.raises(ConfigError, match="chat template refuses"):
            tokenizer.render_chat(CHAT)


HOSTILE_TEMPLATES = (
    "{{ 1 / 0 }}",
    "{{ messages + 1 }}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "{{ raise_exception('two\nlines') }}",
)


@pytest.mark.parametrize("template", HOSTILE_TEMPLATES)
def test_a_template_that_fails_in_any_way_is_one_line(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer.from_directory(write_tokenizer(tmp_path, chat_template=template))
    assert tokenizer is not None
    with pytest.raises(ConfigError, match="chat template refuses") as caught:
        tokenizer.render_chat(CHAT)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [["default"], {"a": 1}, None])
def test_template_lists_may_hold_anything(tmp_path: Path, name: Any) -> None:
    tokenizer = Tokenizer.from_directory(write_tokenizer(tmp_path, chat_template=[1, {"name": name, "template": "x"}]))
    assert tokenizer is not None
    assert tokenizer.chat_template is None


def test_truncation_and_padding_of_a_tokenizer_file_are_not_followed(tmp_path: Path) -> None:
    """Left over from training, they would shorten every prompt in silence, or fill it up with pad tokens."""
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    fill = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    fill |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({**TINY_TOKENIZER, "truncation": cut, "padding": fill}))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("a b a b a", begin=False) == [0, 1, 0, 1, 0]


BROKEN_PARTS = {
    "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "absent", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    },
}


@pytest.mark.parametrize("part", sorted(BROKEN_PARTS))
def test_a_panic_of_the_tokenizer_library_is_a_checkpoint_error(tmp_path: Path, part: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({**TINY_TOKENIZER, part: BROKEN_PARTS[part]}))

    def use() -> None:
        made = Tokenizer.from_directory(tmp_path)
        assert made is not None
        made.encode("a b")

    with pytest.raises(CheckpointError) as caught:
        use()
    assert "\n" not in str(caught.value)
