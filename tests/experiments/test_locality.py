"""The locality experiment on small traces: which documents are fitted to, what is written, which texts are refused."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from nosa_sys.errors import ConfigError
from nosa_sys.experiments import locality
from nosa_sys.experiments.locality_captures import DOCUMENT_FILE, SKIP_CHARACTERS, read_documents
from nosa_sys.simulator.locality.fitted import load_fitted
from nosa_sys.sparse_config import SparseConfig
from tests.traces.synthetic import make_trace

CFG = SparseConfig(block_size=32, topk=12, init_blocks=1, window_size=64, select_blocks=4)


def test_fits_to_the_first_and_holds_out_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(locality, "BLOCK_SIZES", (32,))
    monkeypatch.setattr(locality, "DRAWS", 1)
    monkeypatch.setattr(locality, "_sweep_rate", lambda model: {"n_configurations": 0})
    traces = []
    for index in range(2):
        folder = make_trace(cfg=CFG, n_layers=1, sequences=((800, 258, 0),), seed=index).write(tmp_path / f"t{index}")
        (folder / DOCUMENT_FILE).write_text(json.dumps({"name": f"text {index}", "sha256": "0" * 64}))
        traces.append(folder)
    out = tmp_path / "out"
    out.mkdir()
    said = []
    document = locality.run(traces, 1, out, said.append)
    assert [d["name"] for d in document["fitted_documents"]] == ["text 0"]
    assert [d["name"] for d in document["held_out_documents"]] == ["text 1"]
    model = load_fitted(out / "model.json")
    assert [d["name"] for d in model.provenance["documents"]] == ["text 0"]
    assert json.loads((out / "summary.json").read_text()) == document
    table = pq.read_table(out / "comparisons.parquet").to_pandas()
    assert len(table) == len(document["rows"])
    assert set(zip(table.documents, table.model, strict=True)) == {
        (part, name) for part in ("fitted", "held_out") for name in ("fitted", "simple")
    }
    assert (table.setting_block_size == 32).all()
    assert any(line.startswith("fitted model, held_out: nosa b32 12/4 1k exact") for line in said)


def test_documents_are_named_hashed_and_cut(tmp_path):
    for name in ("b.md", "a.txt", "c.png"):
        (tmp_path / name).write_text("x" * SKIP_CHARACTERS + name)
    found = read_documents(tmp_path, 2)
    assert [(d.name, d.text) for d in found] == [("a", "a.txt"), ("b", "b.md")]
    assert all(len(d.sha256) == 64 for d in found)
    with pytest.raises(ConfigError, match="holds 2"):
        read_documents(tmp_path, 3)
