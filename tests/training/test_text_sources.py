"""Token packs: the very sequences of the texts, checked on opening, refused for anything they were not made for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from nosa_sys.errors import ConfigError
from nosa_sys.models.load import LoadedModel
from nosa_sys.training.loop import Trainer
from nosa_sys.training.text_sources import DocumentTexts, TextSource, TokenPack, open_texts, write_pack
from nosa_sys.training.texts import Document
from tests.training.small import VOCAB, ByteTokenizer, tiny
from tests.training.test_loop import settings

TOKENIZER = ByteTokenizer()


def texts() -> DocumentTexts:
    return DocumentTexts([Document(f"{i}.txt", chr(40 + i) * (150 + 31 * i)) for i in range(12)], 0.3)


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    path = tmp_path / "pack.safetensors"
    counts = write_pack(path, [settings(), settings(seed=1), settings(method="dma", steps=9)], texts(), TOKENIZER)
    assert counts == {
        "length112.streams3.seed0": 18,
        "length112.streams3.held_out": 1,
        "length112.streams3.seed1": 16,
    }
    return path


@pytest.mark.parametrize(("seed", "held_out"), [(0, False), (1, False), (0, True), (1, True)])
def test_a_pack_holds_the_sequences_of_the_texts(pack: Path, seed: int, held_out: bool) -> None:
    chosen = settings(seed=seed)
    packed, plain = (
        source.sequences(chosen, TOKENIZER, held_out=held_out) for source in (open_texts(pack, 0.3), texts())
    )
    for _ in range(1 if held_out else 16):
        assert np.array_equal(packed.next(), plain.next())
    with pytest.raises(ConfigError, match="the token pack ends after"):
        [packed.next() for _ in range(9)]


def test_a_pack_names_the_same_texts(pack: Path) -> None:
    assert TokenPack(pack).names == texts().names
    assert TokenPack(pack).digests == texts().digests


@pytest.mark.parametrize("packed_first", [True, False])
def test_a_run_goes_on_from_either_source(pack: Path, packed_first: bool, tmp_path: Path) -> None:
    """Bit for bit an unbroken run, whichever of the two each half reads."""

    def train(directory: str, source: TextSource, stop_after_s: float | None, *, resume: bool = False) -> Trainer:
        loaded = LoadedModel(tiny(), "tiny", [], TOKENIZER)
        run = Trainer(settings(steps=4), source, tmp_path / directory, resume=resume, loaded=loaded)
        run.run(stop_after_s=stop_after_s)
        return run

    sources: list[TextSource] = [TokenPack(pack), texts()]
    first, second = sources if packed_first else sources[::-1]
    train("parts", first, 0.0)
    parts, whole = train("parts", second, None, resume=True), train("whole", texts(), None)
    logs = [[json.loads(line)["loss"] for line in (tmp_path / d / "loss.jsonl").open()] for d in ("parts", "whole")]
    assert logs[0] == logs[1]
    for name, tensor in whole.model.parameters.items():
        assert tensor.equal(parts.model.parameters[name]), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"held_out": 0.2}, "was made with held_out 0.3, not 0.2"),
        ({"length": 96}, "holds no sequences length96.streams3.seed0; it has length112"),
        ({"seed": 2}, "holds no sequences length112.streams3.seed2"),
    ],
)
def test_other_runs_are_refused(pack: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TokenPack(pack).sequences(settings(**change), TOKENIZER)


def test_other_tokenizers_and_broken_files_are_refused(pack: Path, tmp_path: Path) -> None:
    other = ByteTokenizer()
    other._backend.add_tokens(["x"])
    with pytest.raises(ConfigError, match="was made with tokenizer"):
        TokenPack(pack).sequences(settings(), other)
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    (tmp_path / "torn.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match="are not those that were written"):
        TokenPack(tmp_path / "torn.safetensors")
    for number, content in enumerate((b"", b"noise" * 9, bytes(data[:80]))):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="is no token pack"):
            TokenPack(path)
    with pytest.raises(ConfigError, match="one held_out"):
        write_pack(tmp_path / "p.safetensors", [settings(), settings(held_out=0.2)], texts(), TOKENIZER)


@pytest.mark.parametrize("change", [{"version": 2}, {"held_out": None}, {"tokenizer": None}])
def test_a_pack_of_another_version_or_without_a_record_is_refused(
    pack: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    with safe_open(pack, framework="np") as file:
        record = json.loads(file.metadata()["nosa_sys"]) | change
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    record = {name: value for name, value in record.items() if value is not None}
    save_file(tensors, tmp_path / "strange.safetensors", metadata={"nosa_sys": json.dumps(record)})
    with pytest.raises(ConfigError, match=r"strange.safetensors is no token pack"):
        TokenPack(tmp_path / "strange.safetensors")


@pytest.mark.parametrize("name", ["length112.streams3.seed0", "length112.streams3.held_out"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: ids[:, :-1].copy(), r"holds uint16 \[\d+, 111\], not sequences of length=112"),
        (lambda ids: ids.reshape(-1), r"holds uint16 \[\d+\], not sequences of length=112"),
        (lambda ids: ids.astype(np.float32), "holds float32"),
        (lambda ids: np.where(np.arange(112) == 111, 64, ids).astype(np.uint16), "holds the id 64.* ends at 63"),
        (lambda ids: np.where(np.arange(112) == 0, -1, ids.astype(np.int32)).astype(np.int32), "holds the id -1"),
    ],
)
def test_sequences_that_a_model_cannot_read_are_refused_before_training(
    pack: Path, tmp_path: Path, name: str, change: Callable[[np.ndarray], np.ndarray], message: str
) -> None:
    """Digests that are right do not make a tensor's shape or its ids so. The last id of a vocabulary is fine."""
    with safe_open(pack, framework="np") as file:
        record = json.loads(file.metadata()["nosa_sys"])
        tensors = {key: file.get_tensor(key) for key in record["tensors"]}
    assert max(int(ids.max()) for ids in tensors.values()) == VOCAB - 1
    tensors[name] = change(tensors[name])
    record["tensors"][name] = hashlib.sha256(tensors[name].tobytes()).hexdigest()
    save_file(tensors, tmp_path / "other.safetensors", metadata={"nosa_sys": json.dumps(record)})
    source = TokenPack(tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match=f"{name} {message}"):
        Trainer(settings(), source, tmp_path / "run", loaded=LoadedModel(tiny(), "tiny", [], TOKENIZER))
    assert not (tmp_path / "run").exists()


def test_a_position_beyond_the_end_of_a_pack_is_refused(pack: Path) -> None:
    """A run goes on from a pack of fewer steps than it has done."""
    sequences = TokenPack(pack).sequences(settings(), TOKENIZER)
    sequences.restore({"n_drawn": 19})
    with pytest.raises(ConfigError, match="the token pack ends after 18 sequences"):
        sequences.next()
