"""Trace sets end to end on a tiny model: captures, resumption, card, compact part, and what is refused."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from nosa_sys.errors import ConfigError
from nosa_sys.experiments.trace_set import main
from nosa_sys.experiments.trace_set_recipe import parse_trace_set
from nosa_sys.traces.check import check_trace
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.replay import replay
from tests.cli.tiny_checkpoint import SHAPE, write_checkpoint
from tests.traces.synthetic import DictSlots

SPARSE = {"block_size": 16, "kernel_size": 16, "kernel_stride": 8, "topk": 5, "window_size": 16, "select_blocks": 2}
TOPK, HOT_SLOTS, STEPS, CONTEXT = 5, 7, 6, 150
DOCUMENTS = {"tale": "novel", "guide": "manual", "play": "dialogue"}
ROOT = Path(__file__).resolve().parents[2]


def fill(place: Path) -> None:
    """A model, texts and a recipe."""
    write_checkpoint(place / "model")
    (place / "texts").mkdir()
    for i, name in enumerate(DOCUMENTS):
        (place / "texts" / f"{name}.txt").write_text(" ".join(f"{name} {n * n + i}." for n in range(60)))
    write_recipe(place)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what a session needs, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Such a folder after a whole session; only to be read."""
    folder = tmp_path_factory.mktemp("done")
    fill(folder)
    with contextlib.chdir(folder):
        assert session() == 0
    return folder


def recipe() -> dict[str, Any]:
    return {
        "name": "tiny",
        "model": "model",
        "steps": STEPS,
        "batch": 2,
        "contexts": [{"tokens": CONTEXT, "sparse": SPARSE, "rope_theta": 5000.0}],
        "methods": [
            {"context": CONTEXT, "method": "nosa"},
            {"context": CONTEXT, "method": "full", "head": "none"},
        ],
        "documents": [
            {"name": name, "kind": kind, "source": "file", "members": [f"{name}.txt"], "licence": "public domain"}
            for name, kind in DOCUMENTS.items()
        ],
        "shipped_scores": [{"context": CONTEXT, "method": "nosa", "documents": ["guide"], "bits": 6}],
    }


def write_recipe(place: Path, **changes: Any) -> None:
    (place / "set.yaml").write_text(yaml.safe_dump(recipe() | changes))


def session(*more: str) -> int:
    return main(["set.yaml", "--out", "out", "--texts", "texts", "--threads", "1", "--workers", "1", *more])


def card(place: Path) -> dict[str, Any]:
    return json.loads((place / "out" / "shipped" / "summary.json").read_text())


def stream_rows(trace: Path, sequence: int) -> dict[tuple[int, int], list[tuple[int, set[int]]]]:
    """(position, blocks) of every step, by layer and head, with plain pyarrow."""
    streams = defaultdict(list)
    for part in sorted((trace / "selections").iterdir()):
        for row in pq.read_table(part).to_pylist():
            if row["sequence"] == sequence:
                streams[row["layer"], row["kv_head"]].append((row["position"], set(row["block_ids"])))
    return {key: sorted(rows, key=lambda row: row[0]) for key, rows in streams.items()}


def expected_figures(trace: Path, sequence: int) -> dict[str, float]:
    """gamma and misses from sets and lists, as the counting rules of docs/trace-format.md have them."""
    gammas, sizes, misses = [], [], {"misses_k": [], "misses_hot": []}
    for rows in stream_rows(trace, sequence).values():
        caches = {
            "misses_k": DictSlots(TOPK, "exact", rows[0][0], SPARSE["block_size"]),
            "misses_hot": DictSlots(HOT_SLOTS, "lru", rows[0][0], SPARSE["block_size"]),
        }
        for now, (position, blocks) in enumerate(rows):
            current = position // SPARSE["block_size"]
            for name, cache in caches.items():
                missed = cache.serve(sorted(blocks), current, now, {})
                if now:
                    misses[name].append(missed)
            if now:
                before = rows[now - 1][1]
                gammas.append(len(blocks & before) / len(blocks))
                sizes.append(len(blocks))
    found = {name: float(np.mean(values)) for name, values in misses.items()}
    return found | {
        "gamma_macro": float(np.mean(gammas)),
        "gamma_weighted": float(np.average(gammas, weights=sizes)),
    }


def test_everything_is_captured_checked_and_shipped(done: Path) -> None:
    document = card(done)
    names = [entry["name"] for entry in document["traces"]]
    captures = [f"{CONTEXT}-{method}-{batch}" for method in ("nosa", "full") for batch in (0, 1)]
    assert names == [*captures, f"{CONTEXT}-nosa-0-scores"]
    shipped = done / "out" / "shipped"
    for name in names:
        trace = Trace.open(shipped / name)
        assert check_trace(trace).ok
        assert trace.has("scores") == name.endswith("-scores")
        assert trace.meta.forced_tokens["source"] == "document"
    rows = {(row["trace"], row["document"]): row for row in document["rows"]}
    assert len(rows) == 2 * len(DOCUMENTS)
    for name, sequence, title in (("nosa-0", 0, "tale"), ("nosa-0", 1, "guide"), ("nosa-1", 0, "play")):
        row = rows[f"{CONTEXT}-{name}", title]
        for key, value in expected_figures(done / "out" / "captures" / f"{CONTEXT}-{name}", sequence).items():
            assert row[key] == pytest.approx(value), key
        block_bytes = 2 * SPARSE["block_size"] * SHAPE.head_dim * 4
        per_step = row["misses_k"] * SHAPE.n_layers * SHAPE.n_kv_heads * block_bytes
        assert row["h2d_bytes_per_step_k"] == pytest.approx(per_step)
        assert (row["context"], row["steps"], row["kind"]) == (CONTEXT, STEPS, DOCUMENTS[title])
    assert any(row["misses_k"] > 0 for row in rows.values())
    assert all(row["misses_k"] == 0 for (name, _), row in rows.items() if "full" in name)
    text = (shipped / "README.md").read_text()
    assert all(f"| {title} | {kind} |" in text for title, kind in DOCUMENTS.items())
    assert str(done) not in text + json.dumps(document)


def test_every_method_decodes_the_documents_own_tokens(done: Path) -> None:
    text = (done / "texts" / "guide.txt").read_text()
    for method in ("nosa", "full"):
        folder = done / "out" / "captures" / f"{CONTEXT}-{method}-0"
        tokens = json.loads((folder / "tokens.json").read_text())
        assert len(tokens) == 2
        documents = json.loads((folder / "trace_set.json").read_text())["documents"]
        assert documents[1]["sha256"] == hashlib.sha256(text.encode()).hexdigest()
        assert documents[1]["tokens"] == len(text)  # the tokenizer's tokens are bytes
        assert json.loads((folder / "capture.json").read_text())["text"][1] == text[CONTEXT - STEPS : CONTEXT]


def test_shipped_scores_are_of_the_named_documents_and_select_again(done: Path) -> None:
    trace = Trace.open(done / "out" / "shipped" / f"{CONTEXT}-nosa-0-scores")
    assert [info.id for info in trace.meta.sequences] == [1]
    entry = card(done)["traces"][-1]
    assert entry["documents"] == {"1": "guide"}
    assert entry["check"]["n_rows_reselected"] == STEPS * SHAPE.n_layers * SHAPE.n_kv_heads
    assert replay(trace, method="infllmv2").reselected


def test_sums_are_those_of_the_files(done: Path) -> None:
    shipped = done / "out" / "shipped"
    found = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=shipped, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    assert len(found.stdout.splitlines()) == len([p for p in shipped.rglob("*") if p.is_file()]) - 1


def test_a_session_goes_on_where_the_last_one_stopped(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert session("--minutes", "0") == 3
    assert not (place / "out" / "shipped").exists()
    for killed in (f"captures/{CONTEXT}-nosa-0", f"parts/{CONTEXT}-nosa-0", "shipped"):
        (place / "out" / f"{killed}.partial" / "selections").mkdir(parents=True)
    assert session("--only", "*-nosa-*") == 0
    kept = place / "out" / "captures" / f"{CONTEXT}-nosa-0" / "capture.json"
    written = kept.stat().st_mtime_ns, (place / "out" / "parts" / f"{CONTEXT}-nosa-0" / "meta.json").stat().st_mtime_ns
    shutil.rmtree(place / "out" / "captures" / f"{CONTEXT}-nosa-1")
    capsys.readouterr()
    assert session() == 0
    said = capsys.readouterr().out
    assert f"{CONTEXT}-nosa-1:" in said
    assert f"{CONTEXT}-nosa-0:" not in said
    assert "3 of 3, about 0 s left" in said
    again = kept.stat().st_mtime_ns, (place / "out" / "parts" / f"{CONTEXT}-nosa-0" / "meta.json").stat().st_mtime_ns
    assert again == written
    assert card(place)["captures_finished"] == card(place)["captures_planned"] == 4


def test_captures_of_other_settings_are_not_mixed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert session("--only", f"{CONTEXT}-nosa-0") == 0
    for change, what in (({"seed": 1}, "seed 0, not 1"), ({"steps": 5}, "steps 6, not 5")):
        write_recipe(place, **change)
        assert session("--only", f"{CONTEXT}-nosa-0") == 2
        assert what in capsys.readouterr().err
    write_recipe(place)
    (place / "texts" / "tale.txt").write_text("another tale " * 30)
    assert session("--only", f"{CONTEXT}-nosa-0") == 2
    assert "captured with documents" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda place: (place / "texts" / "play.txt").unlink(), "no text play.txt for document play"),
        (lambda place: (place / "texts" / "play.txt").write_text("short"), "document play has 5 tokens, context 150"),
        (lambda place: shutil.rmtree(place / "texts"), "no such folder or archive of texts"),
        (
            lambda place: write_recipe(
                place, methods=[{"context": CONTEXT, "method": "nosa", "adapter": "a.safetensors"}]
            ),
            "150-nosa-0: no such adapter: a.safetensors",
        ),
        (lambda place: write_recipe(place, budget_bytes=9000), "over budget_bytes=9000; largest: 150-"),
    ],
)
def test_what_is_missing_or_too_large_is_named(
    place: Path, capsys: pytest.CaptureFixture[str], spoil: Any, said: str
) -> None:
    spoil(place)
    assert session("--only", "*-nosa-*") == 2
    assert said in capsys.readouterr().err
    assert not (place / "out" / "shipped").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": CONTEXT}, "must be longer"),
        ({"methods": [{"context": 8, "method": "nosa"}]}, "context=8 must be one of"),
        ({"methods": recipe()["methods"][:1] * 2}, "methods must be one or more, each once"),
        ({"documents": []}, "documents must be one or more"),
        ({"documents": [recipe()["documents"][0] | {"kind": "poem"}]}, "kind='poem' must be one of"),
        ({"documents": [recipe()["documents"][0] | {"source": "pypi"}]}, "needs a package"),
        ({"shipped_scores": [{"context": CONTEXT, "method": "dma", "documents": ["tale"]}]}, "is not captured"),
        ({"shipped_scores": [{"context": CONTEXT, "method": "nosa", "documents": ["x"]}]}, "x is no document"),
        ({"contexts": {}}, "must be a list of mappings"),
    ],
)
def test_recipes_that_mean_nothing_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_trace_set(recipe() | change, "set.yaml")


def test_the_recipe_of_the_project_covers_what_it_should() -> None:
    settings = parse_trace_set(yaml.safe_load((ROOT / "experiments" / "trace-set.yaml").read_text()), "trace-set.yaml")
    kinds = [document.kind for document in settings.documents]
    assert sorted(kinds) == sorted(2 * ["novel", "manual", "code", "dialogue"])
    cells = {(entry.context, entry.method) for entry in settings.methods}
    assert cells == {(c, m) for c in (8192, 16384) for m in ("nosa", "infllmv2", "dma", "full")}
    for context in settings.contexts:
        sparse = context.sparse
        assert 4 * sparse.topk * sparse.block_size == context.tokens
        assert 4 * sparse.window_size == sparse.topk * sparse.block_size
        assert 4 * sparse.select_blocks == sparse.topk
    for capture in settings.captures():
        kinds = {d.kind for d in settings.documents if d.name in capture.documents}
        assert kinds == {"novel", "manual", "code", "dialogue"}


def test_what_is_no_trace_set_is_never_replaced(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = place / "run"  # as training leaves it
    run.mkdir()
    (run / "summary.json").write_text("{}")
    for shipped in (str(run), "set.yaml", "."):
        assert session("--shipped", shipped, "--minutes", "0") == 2
        assert "nor a shipped trace set" in capsys.readouterr().err
    assert [path.name for path in run.iterdir()] == ["summary.json"]
    assert (place / "set.yaml").is_file()


def test_what_was_changed_since_is_made_anew_or_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shipped part is the one that was checked, whatever became of it in OUT/parts."""
    assert session() == 0
    parts, shipped = place / "out" / "parts", place / "out" / "shipped"
    before = {path.relative_to(shipped): path.read_bytes() for path in shipped.rglob("*.parquet")}
    (table,) = (parts / f"{CONTEXT}-nosa-0" / "selections").iterdir()
    table.write_bytes(b"damaged")
    (parts / f"{CONTEXT}-nosa-1" / "figures.json").write_text("{")
    (parts / f"{CONTEXT}-full-0" / "meta.json").write_text("{}")
    assert session() == 0
    assert {path.relative_to(shipped): path.read_bytes() for path in shipped.rglob("*.parquet")} == before
    about = place / "out" / "captures" / f"{CONTEXT}-nosa-0" / "trace_set.json"
    for text in ("{", "[]"):
        about.write_text(text)
        capsys.readouterr()
        assert session() == 2
        assert "trace_set.json cannot be read" in capsys.readouterr().err
