"""User errors: exit status 2, one line on stderr that names the value, no traceback, nothing half-written."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest

from nosa_sys.cli import app
from nosa_sys.errors import HardwareError
from tests.cli.conftest import BUDGETS, KERNEL, Nosa, Outcome


def refused(result: Outcome, *words: str) -> None:
    lines = [line for line in result.err.splitlines() if line.startswith("nosa: ")]
    assert result.status == 2, result.err
    assert len(lines) == 1, result.err
    assert "Traceback" not in result.err
    for word in words:
        assert word in lines[0], lines[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--topk", "0"], ["topk=0"]),
        (["--block-size", "0"], ["block_size=0"]),
        (["--block-size", "24"], ["block_size=24"]),
        (["--topk", "16"], ["topk=16", "exceeds"]),
        (["--k-e", "70"], ["k_e=70", "topk=64"]),
        (["--k-e", "4"], ["topk=64"]),
        (["--select-blocks", "0"], ["select_blocks=0", "dma"]),
        (["--topk", "64", "--topk-tokens", "4096"], ["topk=64", "topk_tokens=4096", "only one"]),
        (["--topk-tokens", "4097"], ["topk_tokens=4097", "block_size=64"]),
        (["--window-size", "100"], ["window_size=100", "block_size=64"]),
        (["--method", "magic"], ["magic", "nosa"]),
        (["--slots", "3"], ["slots=3", "64"]),
        (["--policy", "belady"], ["belady", "replay"]),
        (["--policy", "random"], ["random"]),
        (["--dtype", "int4"], ["int4"]),
        (["--head", "big"], ["big"]),
        (["--device", "abacus"], ["abacus"]),
        (["--device", "meta"], ["meta", "cpu"]),
        (["--slots", str(2**70)], ["slots=1180591620717411303424"]),
        (["--threads", str(2**40)], ["threads=1099511627776"]),
        (["--rope-theta", "-3"], ["rope_theta=-3", "> 0"]),
        (["--rope-theta", "nan"], ["rope_theta=nan"]),
        (["--temperature", "nan"], ["temperature"]),
        (["--top-p", "1.5"], ["top_p=1.5"]),
        (["--max-new-tokens", "0"], ["max-new-tokens"]),
        (["--seed", "-1"], ["seed"]),
        (["--model", "no/such/model"], ["no/such/model"]),
        (["--prompt-file", "missing.txt"], ["missing.txt"]),
        (["--force-tokens", "missing.json"], ["missing.json"]),
        (["--config", "missing.yaml"], ["missing.yaml"]),
        (["--no-such-option"], ["--no-such-option"]),
        (["--topk", "many"], ["--topk"]),
    ],
)
def test_capture_refuses(
    nosa: Nosa, checkpoint: Path, prompt: Path, tmp_path: Path, flags: list[str], words: list[str]
) -> None:
    out = tmp_path / "trace"
    result = nosa("capture", "--model", checkpoint, "--prompt-file", prompt, "--out", out, *flags)
    refused(result, *words)
    assert not list(tmp_path.iterdir()), "nothing half-written"


def test_case_30_slots_below_need_are_refused_with_the_minimum(
    nosa: Nosa, checkpoint: Path, prompt: Path, tmp_path: Path
) -> None:
    """Case 30: the refusal comes at the start and names the minimum; the exact fit works."""
    common = ("capture", "--model", checkpoint, "--prompt-file", prompt, "--max-new-tokens", 2, *BUDGETS, *KERNEL)
    refused(nosa(*common, "--slots", 5, "--out", tmp_path / "few"), "slots=5", "6")
    assert nosa(*common, "--slots", 6, "--out", tmp_path / "fit").status == 0


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00bad"])
def test_bad_prompt_files(nosa: Nosa, checkpoint: Path, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(content)
    refused(nosa("capture", "--model", checkpoint, "--prompt-file", path, "--out", tmp_path / "t"), "prompt.txt")
    assert [p.name for p in tmp_path.iterdir()] == ["prompt.txt"]


@pytest.mark.parametrize("content", ["{", "[1, 2.5]", '{"a": 1}', "[true]", "[[1], [2], [3]]", "[99999]"])
def test_bad_forced_tokens(nosa: Nosa, checkpoint: Path, prompt: Path, tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(content)
    result = nosa(
        *("capture", "--model", checkpoint, "--prompt-file", prompt, "--force-tokens", path, *BUDGETS, *KERNEL),
        *("--out", tmp_path / "t"),
    )
    refused(result, "token")
    assert [p.name for p in tmp_path.iterdir()] == ["tokens.json"]


@pytest.mark.parametrize("command", ["replay", "simulate", "report"])
def test_broken_traces_are_named(nosa: Nosa, trace: Path, tmp_path: Path, command: str) -> None:
    more = {"simulate": ["--hardware", "ideal", "--h2d-gbps", 10], "report": ["--out", tmp_path / "r.html"]}
    verb = command.split()
    refused(nosa(*verb, tmp_path / "nowhere", *more.get(command, [])), "nowhere")
    broken = tmp_path / "broken"
    shutil.copytree(trace, broken)
    part = broken / "selections" / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-40])
    refused(nosa(*verb, broken, *more.get(command, [])), "part-00000.parquet")
    (broken / "meta.json").write_text("{not json")
    refused(nosa(*verb, broken, *more.get(command, [])), "meta.json")
    assert [p.name for p in tmp_path.iterdir()] == ["broken"]


def test_trace_check_names_what_is_broken(nosa: Nosa, trace: Path, tmp_path: Path) -> None:
    assert nosa("trace", "check", trace).status == 0
    refused(nosa("trace", "check", tmp_path / "nowhere"), "nowhere")
    broken = tmp_path / "broken"
    shutil.copytree(trace, broken)
    part = broken / "selections" / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-40])
    result = nosa("trace", "check", broken, "--json")
    assert result.status == 1
    assert len(result.err.rstrip().splitlines()[-1:]) == 1
    assert "part-00000.parquet" in result.err.rstrip().splitlines()[-1]
    assert result.document["ok"] is False


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["--hardware"]),
        (["--hardware", "ideal"], ["h2d"]),
        (["--hardware", "ideal", "--h2d-gbps", "nan"], ["h2d_gbps=nan"]),
        (["--hardware", "ideal", "--h2d-gbps", "-3"], ["h2d_gbps=-3"]),
        (["--hardware", "ideal", "--h2d-gbps", "1e-320"], ["h2d_gbps", "byte a second"]),
        (["--hardware", "abacus"], ["abacus", "h200-provisional"]),
        (["--hardware", "ideal", "--h2d-gbps", "10", "--model-shape", "nosa-9b"], ["nosa-9b"]),
        (["--hardware", "ideal", "--h2d-gbps", "10", "--schedule", "magic"], ["magic", "serial"]),
        (["--hardware", "ideal", "--h2d-gbps", "10", "--slots", "2"], ["2", "6"]),
        (["--hardware", "ideal", "--h2d-gbps", "10", "--batch", "0"], ["batch"]),
    ],
)
def test_simulate_refuses(nosa: Nosa, trace: Path, flags: list[str], words: list[str]) -> None:
    refused(nosa("simulate", trace, *flags), *words)


@pytest.mark.parametrize(
    "flags",
    [
        ["--hardware", "nosuch"],
        ["--hardware", "ideal"],
        ["--hardware", "h200", "--link", "nosuch"],
        ["--hardware", "ideal", "--h2d-gbps", "8", "--fetch-paths"],
        ["--hardware", "ideal", "--h2d-gbps", "8", "--timeline", "."],
    ],
)
def test_simulate_refuses_hardware_before_its_table(nosa: Nosa, trace: Path, flags: list[str]) -> None:
    result = nosa("simulate", trace, *flags)
    refused(result)
    assert len(result.err.splitlines()) == 1, result.err


def test_a_failing_simulate_leaves_its_timeline_as_it_was(
    nosa: Nosa, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise HardwareError("nothing to compare")

    monkeypatch.setattr("nosa_sys.cli.simulate.fetch_path_document", fails)
    path = tmp_path / "steps.json.gz"
    asked = ("simulate", trace, "--hardware", "h200", "--model-shape", "nosa-1b", "--extrapolate", "--fetch-paths")
    refused(nosa(*asked, "--timeline", path), "nothing to compare")
    assert not list(tmp_path.iterdir())
    path.write_text("of yesterday")
    refused(nosa(*asked, "--timeline", path, "--overwrite"), "nothing to compare")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "of yesterday"


def test_replay_without_scores_says_how_to_get_them(nosa: Nosa, checkpoint: Path, prompt: Path, tmp_path: Path) -> None:
    common = ("capture", "--model", checkpoint, "--prompt-file", prompt, "--max-new-tokens", 3, *BUDGETS, *KERNEL)
    assert nosa(*common, "--out", tmp_path / "plain").status == 0
    refused(nosa("replay", tmp_path / "plain", "--topk", 8), "--scores")


def test_existing_outputs_are_kept_unless_asked(nosa: Nosa, checkpoint: Path, prompt: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    common = ("capture", "--model", checkpoint, "--prompt-file", prompt, "--max-new-tokens", 2, *BUDGETS, *KERNEL)
    refused(nosa(*common, "--out", out), "already exists", "--overwrite")
    refused(nosa(*common, "--out", out, "--overwrite"), "did not write")
    assert (out / "thesis.txt").read_text() == "years of work"
    assert nosa(*common, "--out", tmp_path / "trace").status == 0
    refused(nosa(*common, "--out", tmp_path / "trace"), "already exists")
    assert nosa(*common, "--out", tmp_path / "trace", "--overwrite").status == 0


def test_interrupt_ends_with_130_and_one_line(nosa: Nosa, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nosa_sys.cli.replay.replay_document", interrupted)
    result = nosa("replay", trace)
    assert result.status == app.EXIT_INTERRUPTED
    assert result.err.splitlines()[-1] == "nosa: interrupted"


def test_interrupted_capture_keeps_its_whole_steps(
    nosa: Nosa, checkpoint: Path, prompt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nosa_sys.engine.engine import Engine

    real_step, calls = Engine.step, []

    def step(self: Engine) -> object:
        calls.append(1)
        if len(calls) > 4:
            raise KeyboardInterrupt
        return real_step(self)

    monkeypatch.setattr(Engine, "step", step)
    out = tmp_path / "trace"
    result = nosa(
        *("capture", "--model", checkpoint, "--prompt-file", prompt, "--max-new-tokens", 9, *BUDGETS, *KERNEL),
        *("--out", out),
    )
    assert result.status == app.EXIT_INTERRUPTED
    assert not out.exists()
    checked = nosa("trace", "check", tmp_path / "trace.partial", "--allow-incomplete", "--json")
    assert checked.status == 0, checked.err
    refused(nosa("trace", "check", tmp_path / "trace.partial"), "incomplete")
    refused(nosa("trace", "recover", tmp_path / "trace.partial", "--out", out, "--overwrite"), "choose another --out")
    saved = nosa("trace", "recover", tmp_path / "trace.partial", "--out", tmp_path / "recovered", "--json")
    assert saved.status == 0, saved.err
    assert saved.document["n_steps"] == 4
    for verb in (("trace", "check"), ("replay",)):
        assert nosa(*verb, tmp_path / "recovered").status == 0
    simulated = nosa("simulate", tmp_path / "recovered", "--hardware", "ideal", "--h2d-gbps", "32.768")
    assert simulated.status == 0, simulated.err


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("topk: 2026-13-45", "month"),
        ("topk: " + "9" * 5000, "digits"),
        ("temperature: " + "9" * 400, "temperature"),
        ("threads: 0", "threads=0"),
        ("topk: " + "[" * 3000, "bad.yaml"),
    ],
)
def test_config_files_with_impossible_values(
    nosa: Nosa, checkpoint: Path, prompt: Path, tmp_path: Path, content: str, word: str
) -> None:
    config = tmp_path / "bad.yaml"
    config.write_text(content)
    common = ("capture", "--model", checkpoint, "--prompt-file", prompt, "--config", config)
    refused(nosa(*common, "--out", tmp_path / "t"), word)
    assert [p.name for p in tmp_path.iterdir()] == ["bad.yaml"]


@pytest.mark.parametrize("verb", [["replay"], ["simulate", "--hardware", "h200-provisional"]])
def test_an_output_never_replaces_its_input(nosa: Nosa, trace: Path, tmp_path: Path, verb: list[str]) -> None:
    run_folder = tmp_path / "run"
    shutil.copytree(trace, run_folder / "trace")
    (run_folder / "demo.json").write_text("{}")
    for out in (run_folder / "trace", run_folder):
        refused(nosa(verb[0], run_folder / "trace", *verb[1:], "--out", out, "--overwrite"), "read here")
    assert nosa("trace", "check", run_folder / "trace").status == 0


def test_overwriting_leaves_the_neighbours_alone(nosa: Nosa, trace: Path, tmp_path: Path) -> None:
    for name in ("r.old", "r.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("years of work")
    refused(nosa("replay", trace, "--out", tmp_path / "r", "--overwrite"), "r.partial", "did not write")
    shutil.rmtree(tmp_path / "r.partial")
    for _ in range(2):
        assert nosa("replay", trace, "--out", tmp_path / "r", "--overwrite").status == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r", "r.old"]
    assert (tmp_path / "r.old" / "thesis.txt").read_text() == "years of work"


def test_a_trace_out_of_range_cannot_be_drawn(nosa: Nosa, trace: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(trace, broken)
    meta = json.loads((broken / "meta.json").read_text())
    meta["model"]["n_layers"] = 1
    (broken / "meta.json").write_text(json.dumps(meta))
    refused(nosa("report", broken, "--out", tmp_path / "r.html"), "layer=1 is outside [0, 1)")
    assert [p.name for p in tmp_path.iterdir()] == ["broken"]


def test_a_failed_allocation_is_a_user_error_and_another_fault_is_not(
    nosa: Nosa, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(text: str) -> None:
        def raising(*_: object) -> None:
            raise RuntimeError(text)

        monkeypatch.setattr("nosa_sys.cli.replay.replay_document", raising)

    fails("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    refused(nosa("replay", trace), "out of memory")
    fails("a fault of the program")
    with pytest.raises(RuntimeError, match="a fault of the program"):
        nosa("replay", trace)


def test_a_terminal_without_the_characters_gets_escapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "\u65e5" / "trace").mkdir(parents=True)
    (tmp_path / "\u65e5" / "trace" / "meta.json").write_text("{}")
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stdout)
    monkeypatch.setattr("sys.argv", ["nosa", "ls", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        app.main()
    stdout.flush()
    assert ended.value.code == 0
    assert b"\\u65e5" in stdout.buffer.getvalue().replace(b"\n", b"").replace(b" ", b"")
