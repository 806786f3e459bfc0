"""``nosa bench decode`` on a tiny checkpoint: rows, files, sources of selections, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from nosa_sys.engine import memory_plan
from tests.cli.conftest import BUDGETS, KERNEL, Nosa

SIZES = ["--batch", "2", "--context", "150", "--steps", "3", "--warmup", "1"]


def test_injected_misses_make_a_row(nosa: Nosa, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.parquet"
    done = nosa(
        "bench", "decode", "--model-shape", checkpoint, *SIZES, *BUDGETS, *KERNEL, "--misses", "1", "--dtype",
        "float32", "--json", "--out", out,
    )  # fmt: skip
    assert done.status == 0, done.err
    (row,) = done.document["rows"]
    assert row["status"].startswith("injected: synthetic sets, 1 misses")
    assert row["misses_per_head"] == pytest.approx(1)
    assert row["compute_ms"] > 0
    assert row["equivalent_batch"] > 0
    assert row["key_means_dtype"] == "float32"
    assert pd.read_parquet(out)["tokens_per_s"][0] == pytest.approx(row["tokens_per_s"])


def test_prompts_are_prefilled(nosa: Nosa, checkpoint: Path, prompt: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = nosa(
        "bench", "decode", "--model", checkpoint, *SIZES, *BUDGETS, *KERNEL, "--prompt-file", prompt, "--no-parts",
        "--out", out,
    )  # fmt: skip
    assert done.status == 0, done.err
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["status"], row["gamma"]) == ("measured", None)
    assert row["prefill_s"] > 0
    assert "tokens/s, aggregate" in done.out


def test_a_trace_brings_its_own_budgets(nosa: Nosa, checkpoint: Path, trace: Path) -> None:
    sizes = ["--batch", "3", "--steps", "3", "--warmup", "1"]
    done = nosa("bench", "decode", "--model", checkpoint, *sizes, "--trace", trace, "--json")
    assert done.status == 0, done.err
    (row,) = done.document["rows"]
    assert (row["topk"], row["block_size"]) == (6, 16)
    assert "sets of trace" in row["status"]


def test_key_means_in_the_models_type_take_half(nosa: Nosa, checkpoint: Path) -> None:
    rows = []
    for more in ([], ["--key-means-dtype", "model"]):
        done = nosa(
            "bench", "decode", "--model-shape", checkpoint, *SIZES, *BUDGETS, *KERNEL, "--misses", "1", "--dtype",
            "bfloat16", "--no-parts", "--json", *more,
        )  # fmt: skip
        assert done.status == 0, done.err
        rows += done.document["rows"]
    assert rows[0]["sequence_key_mean_bytes"] == 2 * rows[1]["sequence_key_mean_bytes"] > 0
    assert rows[0]["device_context_bytes"] > rows[1]["device_context_bytes"]


def test_a_peer_runs_by_the_same_command(nosa: Nosa, checkpoint: Path) -> None:
    pytest.importorskip("transformers")
    done = nosa(
        "bench", "decode", "--model-shape", checkpoint, *SIZES, "--method", "full", "--dtype", "float32", "--json",
        "--peer", "transformers-dynamic", "--no-parts",
    )  # fmt: skip
    assert done.status == 0, done.err
    assert [row["what"] for row in done.document["rows"]] == ["nosa-sys", "transformers-dynamic"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --model"),
        (["--model-shape", "nosa-1b", "--model", "smollm2-135m"], "give --model"),
        (["--model-shape", "nosa-1b", "--misses", "some"], "--misses 'some'"),
        (["--model-shape", "nosa-1b", "--misses", "2", "--trace", "x"], "at most one"),
        (["--model-shape", "nosa-1b", "--context", "99", "--trace", "x"], "--trace fixes the contexts"),
        (["--model-shape", "nosa-1b", "--device", "cpu", "--key-means-dtype", "half"], "key_means_dtype='half'"),
        (["--model-shape", "nosa-1b", "--peer", "hf"], "--peer 'hf'"),
        (["--model-shape", "nosa-1b", "--out", "rows.csv"], "must end in .json or .parquet"),
        (["--model-shape", "nosa-9b"], "unknown model shape"),
        (["--model-shape", "nosa-1b", "--device", "npx"], "device='npx' is no torch device"),
        (["--model-shape", "nosa-1b", "--device", "cpu", "--slots", "3"], "slots=3 cannot hold the 64 blocks"),
        (["--model-shape", "nosa-1b", "--device", "cpu", "--method", "full", "--slots", "80"], "leave slots out"),
        (["--model-shape", "nosa-1b", "--arena-gib", "inf"], "--arena-gib"),
    ],
)
def test_wrong_requests_are_one_line(nosa: Nosa, arguments: list[str], message: str) -> None:
    done = nosa("bench", "decode", *arguments)
    assert done.status == 2
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1 or "unknown model shape" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_named_before_host_memory(nosa: Nosa, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory decides only once the CPU was asked for; either refusal is one line, without the table."""
    monkeypatch.setattr(memory_plan, "free_bytes", lambda _: 2**20)
    asked = ("bench", "decode", "--model-shape", "nosa-1b", "--misses", "2")
    by_default, on_cpu, on_gpu = (nosa(*asked, *more) for more in ((), ("--device", "cpu"), ("--device", "cuda")))
    for done in (by_default, on_cpu, on_gpu):
        assert done.status == 2
        assert len(done.err.splitlines()) == 1, done.err
    assert by_default.err.startswith("nosa: this benchmark needs an NVIDIA GPU, and torch sees none here")
    assert "host memory" in on_cpu.err
    assert "NVIDIA" not in on_cpu.err
    assert "torch sees none" in on_gpu.err
