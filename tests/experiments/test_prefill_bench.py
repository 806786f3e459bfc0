"""The bench of prefill on a tiny model: what a row holds, parts that add up, wrong requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nosa_sys.engine import prefill
from nosa_sys.experiments import prefill_bench
from nosa_sys.sparse_config import SparseConfig
from tests.training.small import tiny

SPARSE = SparseConfig(16, 16, 8, topk=5, init_blocks=1, window_size=32, select_blocks=1)


@pytest.mark.parametrize("method", ["full", "infllmv2", "nosa", "dma"])
def test_a_row_is_measured_and_its_parts_add_up(method: str) -> None:
    plain = prefill.queue_selection, prefill.prefill_attention
    row = prefill_bench.measure(tiny("float32"), list(range(20)) * 8, SPARSE, method, 50, 2)
    assert (row["context"], row["chunk"], len(row["stored_all_s"])) == (160, 50, 2)
    assert (row["selection_s"] > 0) == (method != "full")
    assert row["attention_s"] > 0
    assert row["rest_s"] > 0
    assert row["selection_s"] + row["attention_s"] + row["rest_s"] == pytest.approx(row["parts_run_s"])
    assert row["stored_tokens_per_s"] == pytest.approx(160 / sum(row["stored_all_s"]) * 2)
    assert (prefill.queue_selection, prefill.prefill_attention) == plain


def test_parts_are_timed_on_whatever_device_and_put_back_after_an_error() -> None:
    plain = prefill.queue_selection
    clock = prefill_bench.PartClock(torch.device("cpu"))
    with pytest.raises(TypeError), clock.watching():
        prefill.queue_selection("too few")
    assert prefill.queue_selection is plain
    assert clock.seconds() == {"selection": 0, "attention": 0}


def test_the_file_holds_the_rows_and_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_bench, "random_model", lambda *_, **__: tiny("float32"))
    out = tmp_path / "prefill.json"
    command = ["--out", str(out), "--contexts", "40,90", "--methods", "nosa", "--random", "nosa-8b", "--repeats", "1"]
    assert prefill_bench.main([*command, "--device", "cpu"]) == 0
    document = json.loads(out.read_text())
    assert [row["context"] for row in document["rows"]] == [40, 90]
    assert document["sparse"]["topk"] == 64
    assert document["versions"]["torch"] == torch.__version__
    assert prefill_bench.main([*command, "--device", "cpu"]) == 2  # the file exists


def test_an_unknown_shape_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prefill_bench.main(["--out", str(tmp_path / "x.json"), "--random", "none"]) == 2
    assert "unknown model shape" in capsys.readouterr().err
