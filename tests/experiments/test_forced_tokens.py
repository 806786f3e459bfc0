"""Forced tokens: what is forced is what is decoded, it is recorded, and what cannot be forced is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from nosa_sys.errors import ConfigError, TraceError
from nosa_sys.experiments.capture import CaptureRequest, open_model, run_capture
from nosa_sys.experiments.forced_tokens import ForcedTokens, read_force_tokens
from nosa_sys.models.load import LoadedModel
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.reader import Trace
from tests.cli.tiny_checkpoint import write_checkpoint

SPARSE = SparseConfig(16, 16, 8, topk=6, init_blocks=1, window_size=32, select_blocks=3)
TEXT = "".join(f"{n} squared is {n * n}. " for n in range(20))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")
    return open_model(CaptureRequest(SPARSE, (TEXT,), 1, model=str(checkpoint)))


def capture(loaded: LoadedModel, out: Path, cut: int, new: int, **changes: object) -> Trace:
    options = {"ignore_eos": True, "max_prompt_tokens": cut, "record_scores": True} | changes
    out.mkdir()
    run_capture(CaptureRequest(SPARSE, (TEXT,), new, **options), out, lambda *_: None, loaded)  # type: ignore[arg-type]
    return Trace.open(out)


def tokens_of(trace: Trace) -> list[list[int]]:
    return json.loads((trace.directory / "tokens.json").read_text())


def test_the_document_goes_on_as_it_is_written(loaded: LoadedModel, tmp_path: Path) -> None:
    document = loaded.tokenizer.encode(TEXT)
    forced = capture(loaded, tmp_path / "forced", 200, 8, force_tokens=ForcedTokens("document"))
    free = capture(loaded, tmp_path / "free", 200, 8)
    assert tokens_of(forced) == [document[200:208]]
    assert tokens_of(free) != tokens_of(forced), "a model that says the same by itself would show nothing"
    digest = hashlib.sha256(np.array(document[200:208], dtype="<i8").tobytes()).hexdigest()
    assert forced.meta.forced_tokens == {"source": "document", "tokens": 8, "sha256": digest}
    assert free.meta.forced_tokens == {}


def test_forced_tokens_are_consumed_as_if_they_were_prompt(loaded: LoadedModel, tmp_path: Path) -> None:
    """The row at position 206 sees the same scores after 200 prompt tokens and 7 forced ones as after 207 of prompt."""
    forced = capture(loaded, tmp_path / "forced", 200, 8, force_tokens=ForcedTokens("document"))
    longer = capture(loaded, tmp_path / "longer", 207, 1)
    free = capture(loaded, tmp_path / "free", 200, 8)
    theirs = np.concatenate(longer.table("scores")["window_scores"].to_pylist())

    def at_206(trace: Trace) -> np.ndarray:
        table = trace.table("scores")
        rows = np.flatnonzero(table["step"].to_numpy() == 7)
        return np.concatenate(table["window_scores"].take(rows).to_pylist())

    np.testing.assert_allclose(at_206(forced), theirs, rtol=1e-4, atol=1e-6)
    assert not np.allclose(at_206(free), theirs, rtol=1e-2)


def test_another_trace_gives_its_tokens_to_other_settings(loaded: LoadedModel, tmp_path: Path) -> None:
    free = capture(loaded, tmp_path / "free", 200, 8)
    again = capture(
        loaded, tmp_path / "again", 200, 8, method="infllmv2", force_tokens=read_force_tokens(free.directory)
    )
    assert tokens_of(again) == tokens_of(free)
    assert again.meta.forced_tokens["source"] == "trace"
    bare = capture(loaded, tmp_path / "bare", 200, 8, force_tokens=tuple(map(tuple, tokens_of(free))))
    assert tokens_of(bare) == tokens_of(free)
    assert bare.meta.forced_tokens == again.meta.forced_tokens | {"source": "tokens"}


def test_what_cannot_be_forced_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    length = len(loaded.tokenizer.encode(TEXT))
    with pytest.raises(ConfigError, match="the document has 5 tokens to force, max_new_tokens=8"):
        capture(loaded, tmp_path / "a", length - 5, 8, force_tokens=ForcedTokens("document"))
    free = capture(loaded, tmp_path / "free", 200, 8)
    with pytest.raises(ConfigError, match="the trace has 8 tokens to force, max_new_tokens=9"):
        capture(loaded, tmp_path / "b", 200, 9, force_tokens=read_force_tokens(free.directory))
    with pytest.raises(ConfigError, match="other prompts"):
        capture(loaded, tmp_path / "c", 199, 8, force_tokens=read_force_tokens(free.directory))
    with pytest.raises(ConfigError, match="2 sequences for 1 prompts"):
        capture(loaded, tmp_path / "d", 200, 1, force_tokens=((1,), (2,)))
    (free.directory / "tokens.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokens\.json"):
        read_force_tokens(free.directory)
    with pytest.raises(TraceError, match="is no trace"):
        read_force_tokens(tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        read_force_tokens(tmp_path / "missing.txt")


def test_a_text_or_ids_shorter_than_what_is_asked_for_are_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    """The model's own tokens, which differ between settings, would follow. As many as asked for are forced."""
    (tmp_path / "text.txt").write_text("abc")
    (tmp_path / "ids.json").write_text("[[5, 6, 7, 8]]")
    text, ids = (read_force_tokens(tmp_path / name) for name in ("text.txt", "ids.json"))
    with pytest.raises(ConfigError, match="the text has 3 tokens to force, max_new_tokens=4; lower --max-new-tokens"):
        capture(loaded, tmp_path / "a", 200, 4, force_tokens=text)
    with pytest.raises(ConfigError, match="the shortest sequence has 4 tokens to force, max_new_tokens=5"):
        capture(loaded, tmp_path / "b", 200, 5, force_tokens=ids)
    trace = capture(loaded, tmp_path / "c", 200, 3, force_tokens=text)
    assert tokens_of(trace)[0] == loaded.tokenizer.encode("abc", begin=False)
    assert (trace.meta.forced_tokens["source"], trace.meta.forced_tokens["tokens"]) == ("text", 3)
    assert tokens_of(capture(loaded, tmp_path / "d", 200, 3, force_tokens=ids)) == [[5, 6, 7]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[]]", "forces nothing"),
        ("9" * 30, "must hold"),
        (f"[{'9' * 30}]", "is no token id"),
        ("[-1]", "is no token id"),
    ],
)
def test_ids_that_are_none_are_refused(loaded: LoadedModel, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "ids.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        capture(loaded, tmp_path / "out", 200, 8, force_tokens=read_force_tokens(tmp_path / "ids.json"))


def test_an_empty_text_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    """Its trace would say that tokens were forced, and hold the model's own."""
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match="forces nothing"):
        capture(loaded, tmp_path / "out", 200, 8, force_tokens=read_force_tokens(tmp_path / "empty.txt"))
