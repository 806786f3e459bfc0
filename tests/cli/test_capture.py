"""nosa capture and generate, end to end on a tiny checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from safetensors.torch import save_file

from nosa_sys.cli.options import EngineFlags
from nosa_sys.engine.cuda.schedules import STEP_SCHEDULES
from nosa_sys.engine.setup import AUTO
from nosa_sys.models.weights import head_tensors
from nosa_sys.traces.reader import Trace
from tests.cli.conftest import BUDGETS, KERNEL, Nosa
from tests.cli.tiny_checkpoint import SHAPE


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


def test_another_rotary_base_changes_what_is_selected(
    nosa: Nosa, checkpoint: Path, prompt: Path, tmp_path: Path
) -> None:
    own = json.loads((checkpoint / "config.json").read_text())["rope_theta"]
    found = {}
    for name, theta in (("model", None), ("own", own), ("larger", 100 * own)):
        flags = () if theta is None else ("--rope-theta", theta)
        result = nosa(
            *("capture", "--model", checkpoint, "--prompt-file", prompt, "--max-new-tokens", 8, "--ignore-eos"),
            *(*BUDGETS, *KERNEL, "--out", tmp_path / name, *flags),
        )
        assert result.status == 0, result.err
        found[name] = Trace.open(tmp_path / name).selections.block_ids.tolist()
    assert found["model"] == found["own"] != found["larger"]


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


def test_the_document_itself_can_be_forced(nosa: Nosa, checkpoint: Path, prompt: Path, tmp_path: Path) -> None:
    arguments = (
        "capture",
        "--model",
        checkpoint,
        "--prompt-file",
        prompt,
        "--max-prompt-tokens",
        200,
        *BUDGETS,
        *KERNEL,
    )
    forced = ("--force-tokens", "document", "--out", tmp_path / "forced")
    result = nosa(*arguments, "--max-new-tokens", 9, *forced, "--json")
    assert result.status == 0, result.err
    text = prompt.read_text()  # the checkpoint's tokenizer takes one character a token
    assert result.document["text"] == [text[200:209]]
    assert result.document["options"]["force_tokens"] == {"value": "document", "origin": "flag"}
    assert Trace.open(tmp_path / "forced").meta.forced_tokens["source"] == "document"
    refused = nosa(*arguments, "--max-new-tokens", 900, *forced, "--overwrite")
    assert (refused.status, "tokens to force" in refused.err) == (2, True)


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


def test_generate_names_its_adapter_and_the_rotary_base_of_its_record(
    nosa: Nosa, checkpoint: Path, tmp_path: Path
) -> None:
    head = {name: torch.zeros(size) for name, size in head_tensors(SHAPE)}
    save_file(head, tmp_path / "adapter.safetensors")
    record = {"label": "zeros [bold]everywhere[/bold]", "settings": {"rope_theta": 400000.0}}
    (tmp_path / "adapter.json").write_text(json.dumps(record))
    arguments = ("generate", "--model", checkpoint, "--prompt", "once upon a time", "--max-new-tokens", 2)
    result = nosa(*arguments, *BUDGETS, *KERNEL, "--adapter", tmp_path / "adapter.safetensors")
    assert result.status == 0, result.err
    lines = result.err.splitlines()
    assert "note: eviction head from adapter.safetensors: zeros [bold]everywhere[/bold]" in lines
    assert "note: rope_theta 400000 taken from the adapter's record" in lines
    assert "note" not in result.out
    assert "note" not in nosa(*arguments, *BUDGETS, *KERNEL).err


def engine_run(prompt: Path, checkpoint: Path, out: Path, *more: object) -> tuple[object, ...]:
    return (
        *("capture", "--model", checkpoint, "--prompt-file", prompt, "--max-new-tokens", 6, "--ignore-eos"),
        *(*BUDGETS, *KERNEL, "--out", out, "--json", *more),
    )


def test_engine_options_reach_the_engine_and_the_banner(
    nosa: Nosa, checkpoint: Path, prompt: Path, tmp_path: Path
) -> None:
    eager = nosa(*engine_run(prompt, checkpoint, tmp_path / "a"))
    options = ("--runner", "kernels", "--schedule", "prefetch", "--n-prefetch", 2, "--slots", 9, "--policy", "lru")
    fused = nosa(*engine_run(prompt, checkpoint, tmp_path / "b", *options, "--timeline"))
    assert (eager.status, fused.status) == (0, 0), fused.err
    assert json.loads((tmp_path / "a/tokens.json").read_text()) == json.loads((tmp_path / "b/tokens.json").read_text())
    noted = eager.document["options"]
    assert noted["schedule"] == {"value": "serial", "origin": "derived from runner"}
    assert noted["runner"] == {"value": "eager", "origin": "derived from device"}
    assert noted["offload"] == {"value": True, "origin": "derived from method"}
    noted = fused.document["options"]
    assert noted["schedule"] == {"value": "prefetch", "origin": "flag"}
    assert noted["n_prefetch"] == {"value": 2, "origin": "flag"}
    assert [Trace.open(tmp_path / name).meta.schedule for name in "ab"] == ["serial", "prefetch"]
    assert (fused.document["runner"], fused.document["schedule_in_use"]) == ("kernels", "prefetch")
    assert sum(Trace.open(tmp_path / "b").table("steps")["prefetch_bytes"].to_pylist()) > 0
    assert (tmp_path / "b" / "timeline.json.gz").is_file()
    assert not (tmp_path / "a" / "timeline.json.gz").exists()


def test_bytes_are_asked_before_and_shown_after(nosa: Nosa, checkpoint: Path, prompt: Path, tmp_path: Path) -> None:
    done = nosa(*engine_run(prompt, checkpoint, tmp_path / "a"))
    heads = 2 * 2  # layers x KV heads of the tiny checkpoint
    slots = heads * 6 * 2 * 16 * 16 * 4
    assert done.document["device_slot_bytes"] == slots
    assert done.document["host_pinned_bytes"] == 0
    assert f"({slots:,} bytes)" in done.err
    asked = done.document["options"]["device KV, asked"]["value"]
    assert int(asked.split("(")[1].split()[0].replace(",", "")) > slots, (
        "betas, maps and the page table lie beside them"
    )


def test_what_cannot_fit_is_refused_before_weights_load(
    nosa: Nosa, checkpoint: Path, prompt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nosa_sys.engine.tensors.memory_available_bytes", lambda: 10_000)
    monkeypatch.setattr("nosa_sys.experiments.capture.load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    for arguments in (
        engine_run(prompt, checkpoint, tmp_path / "a"),
        ("generate", "--model", checkpoint, "--prompt", "once", *BUDGETS, *KERNEL),
        ("bench", "decode", "--model", checkpoint, "--context", 200, "--misses", 1, *BUDGETS, *KERNEL),
    ):
        refused = nosa(*arguments)
        assert refused.status != 0
        assert "10000 are free" in refused.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--runner", "graph"), "needs a CUDA device"),
        (("--runner", "fast"), "unknown runner 'fast'"),
        (("--schedule", "two_batch"), "unknown schedule 'two_batch'"),
        (("--runner", "kernels", "--schedule", "seriall"), "unknown schedule 'seriall'"),
        (("--runner", "kernels", "--schedule", "prefetch"), "raise slots"),
        (("--n-prefetch", 2), "does not speculate"),
        (("--timeline",), "needs --runner graph or kernels"),
        (("--no-offload",), "leave it out"),
    ],
)
def test_engine_options_that_do_not_go(
    nosa: Nosa, checkpoint: Path, prompt: Path, tmp_path: Path, options: tuple[object, ...], words: str
) -> None:
    refused = nosa(*engine_run(prompt, checkpoint, tmp_path / "a", *options))
    assert refused.status == 2
    assert words in " ".join(refused.err.split())


def test_generate_with_all_kv_on_the_device(nosa: Nosa, checkpoint: Path) -> None:
    arguments = ("generate", "--model", checkpoint, "--prompt", "once upon a time", "--max-new-tokens", 6, "--json")
    there, here = (nosa(*arguments, *BUDGETS, *KERNEL, flag) for flag in ("--offload", "--no-offload"))
    assert here.status == 0, here.err
    assert here.document["tokens"] == there.document["tokens"]
    assert (here.document["offload"], here.document["host_pool_bytes"]) == (False, 0)


def test_the_help_lists_the_schedules_that_exist() -> None:
    (option,) = get_type_hints(EngineFlags, include_extras=True)["schedule"].__metadata__
    for name in (*STEP_SCHEDULES, AUTO):
        assert name in option.help
