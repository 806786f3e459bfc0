"""transformers as a peer, tiny and on the CPU."""

from __future__ import annotations

import pytest

from nosa_sys.errors import ConfigError
from nosa_sys.experiments.peers import peer_row, transformers_model
from nosa_sys.model_shape import ModelShape

pytest.importorskip("transformers")
SHAPE = ModelShape("tiny", 2, 4, 2, 8, 24, 40, 64, dtype="float32")


def test_a_dynamic_cache_grows_by_one_token_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformers_model(SHAPE, "cpu")
    lengths = []

    def watched(*args: object, **kwargs: object) -> object:
        lengths.append(kwargs["past_key_values"].get_seq_length())  # type: ignore[attr-defined]
        return type(model).forward(model, *args, **kwargs)

    monkeypatch.setattr(model, "forward", watched)
    row = peer_row(model, SHAPE, batch=3, context=17, cache="dynamic", steps=5, warmup=2)
    assert lengths == [17, 18, 19, 20, 21, 22, 23]
    assert row["tokens_per_s"] == pytest.approx(3 * row["tokens_per_s_per_sequence"])
    assert row["step_ms_p10"] <= row["step_ms_median"] <= row["step_ms_p90"]
    assert "random" in row["status"]


def test_the_offloaded_cache_is_refused_without_a_gpu() -> None:
    with pytest.raises(ConfigError, match="NVIDIA GPU"):
        peer_row(transformers_model(SHAPE, "cpu"), SHAPE, batch=1, context=4, cache="offloaded")
