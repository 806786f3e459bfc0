"""nosa capture and generate, end to end on a tiny checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nosa_sys.traces.reader import Trace
from tests.cli.conftest import BUDGETS, KERNEL, Nosa


def test_capture_leaves_a_whole_trace_and_a_summary(nosa: Nosa, checkpoint: Path, prompt: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace"
    result = nosa(
        *("capture", "--model", checkpoint, "--prompt-file", prompt, "--max-new-tokens", 8, "--ignore-eos"),
        *(*BUDGETS, *KERNEL, "--out", out, "--json"),
    )
    assert result.status == 0, result.err
    document = result.document
    assert result.out.count("\n") == 1, "with --json stdout carries the document alone"
    assert "measured on CPU" in result.err
    assert document["new_tokens"] == 8
    assert document["sparse_step_share"] == 1.0
    assert document["h2d_bytes"] == document["blocks_loaded"] * 2 * 16 * 16 * 4
    assert document["guaranteed_gamma"] == 0.5 <= document["gamma_min"]
    trace = Trace.open(out)
    assert trace.meta.complete
    assert int(trace.selections.h2d_bytes.sum()) == document["h2d_bytes"]
    assert {p.name for p in tmp_path.iterdir()} == {"trace"}, "no partial directory is left"


def test_a_context_past_the_models_own_is_named_before_the_work(
    nosa: Nosa, checkpoint: Path, prompt: Path, tmp_path: Path
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    short = tmp_path / "short"
    shutil.copytree(checkpoint, short)
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40}))
    arguments = ("capture", "--prompt-file", prompt, "--max-new-tokens", 2, "--ignore-eos", *BUDGETS, *KERNEL)
    warned = nosa(*arguments, "--model", short, "--out", tmp_path / "a")
    assert warned.status == 0, warned.err
    assert "the model was made for 40" in warned.err
    assert "the model was made for" not in nosa(*arguments, "--model", checkpoint, "--out", tmp_path / "b").err


def test_case_10_a_run_that_was_never_sparse_says_so(nosa: Nosa, checkpoint: Path, tmp_path: Path) -> None:
    """Case 10: a context below the budget reports 0 % sparse steps, 0 blocks loaded, and a note."""
    short = tmp_path / "short.txt"
    short.write_text("five blocks at most")
    result = nosa(
        *("capture", "--model", checkpoint, "--prompt-file", short, "--max-new-tokens", 4, "--ignore-eos"),
        *(*BUDGETS, *KERNEL, "--out", tmp_path / "trace", "--json"),
    )
    assert result.status == 0, result.err
    assert result.document["sparse_step_share"] == 0
    assert result.document["blocks_loaded"] - result.document["blocks_loaded_cold"] == 0
    assert any("no step was sparse" in note for note in result.document["notes"])


def test_forced_tokens_make_two_settings_see_the_same_text(
    nosa: Nosa, checkpoint: Path, prompt: Path, trace: Path, tmp_path: Path
) -> None:
    tokens = json.loads((trace / "tokens.json").read_text())
    result = nosa(
        *("capture", "--model", checkpoint, "--prompt-file", prompt, "--max-new-tokens", 20, "--ignore-eos"),
        *("--method", "infllmv2", "--force-tokens", trace / "tokens.json", *BUDGETS, *KERNEL),
        *("--out", tmp_path / "forced", "--json"),
    )
    assert result.status == 0, result.err
    assert json.loads((tmp_path / "forced" / "tokens.json").read_text()) == tokens


def test_batch_of_two_prompts_and_spare_slots(nosa: Nosa, checkpoint: Path, prompt: Path, tmp_path: Path) -> None:
    result = nosa(
        *("capture", "--model", checkpoint, "--prompt-file", prompt, "--prompt-file", prompt, "--max-new-tokens", 6),
        *("--max-prompt-tokens", 200, "--slots", 9, "--policy", "beta", "--ignore-eos", *BUDGETS, *KERNEL),
        *("--out", tmp_path / "trace", "--json"),
    )
    assert result.status == 0, result.err
    meta = Trace.open(tmp_path / "trace").meta
    assert [s.prompt_tokens for s in meta.sequences] == [200, 200]
    assert (meta.slots, meta.policy) == (9, "beta")


def test_case_26_rates_are_labelled_per_sequence_and_aggregate(
    nosa: Nosa, checkpoint: Path, prompt: Path, tmp_path: Path
) -> None:
    """Case 26: prefill and cold step are apart, per-sequence and aggregate rates are two figures."""
    result = nosa(
        *("capture", "--model", checkpoint, "--prompt-file", prompt, "--prompt-file", prompt, "--max-new-tokens", 6),
        *("--ignore-eos", *BUDGETS, *KERNEL, "--out", tmp_path / "trace", "--json"),
    )
    document = result.document
    for key in ("tokens_per_s", "tokens_per_s_per_sequence", "cold_step_ms", "warm_step_ms", "prefill_tokens_per_s"):
        assert document[key] > 0, key
    assert document["tokens_per_s"] == pytest.approx(2 * 1000 / document["warm_step_ms"], rel=1e-6)


def test_dry_run_resolves_and_writes_nothing(nosa: Nosa, checkpoint: Path, prompt: Path, tmp_path: Path) -> None:
    result = nosa(
        *("capture", "--model", checkpoint, "--prompt-file", prompt, *BUDGETS, *KERNEL, "--out", tmp_path / "trace"),
        *("--dry-run", "--json"),
    )
    assert result.status == 0, result.err
    options = result.document["options"]
    assert options["k (topk)"] == {"value": "6 blocks = 96 tokens", "origin": "flag"}
    assert options["block (K+V, one head)"]["value"] == "2 KiB (2,048 bytes)"
    assert options["policy"] == {"value": "exact", "origin": "derived"}
    assert not list(tmp_path.iterdir())


def test_generate_streams_text_and_same_seed_gives_same_text(nosa: Nosa, checkpoint: Path) -> None:
    arguments = ("generate", "--model", checkpoint, "--prompt", "once upon a time", "--max-new-tokens", 6)
    sampled = (*arguments, "--temperature", 0.9, "--seed", 3, "--ignore-eos", *BUDGETS, *KERNEL, "--json")
    first, second = nosa(*sampled), nosa(*sampled)
    assert first.status == 0, first.err
    assert first.document["tokens"] == second.document["tokens"]
    assert len(first.document["tokens"]) == 6
    plain = nosa(*arguments, *BUDGETS, *KERNEL)
    assert plain.status == 0
    assert plain.out.endswith("\n")
