"""Model files: they come back as written, are refused when broken, and serve every verb by name."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from nosa_sys.errors import ConfigError
from nosa_sys.model_shape import ModelShape
from nosa_sys.simulator.locality.fitted import MAX_BYTES, FittedLocality, fitted_names, load_fitted, packaged_path
from nosa_sys.simulator.locality.process import ScoreStream
from nosa_sys.simulator.locality.registry import get_locality, locality_names
from nosa_sys.simulator.locality_model import LocalityModel, synthetic_selections
from nosa_sys.simulator.recipe import parse_recipe
from nosa_sys.simulator.simulate import simulate
from nosa_sys.simulator.sources import SyntheticWorkload
from nosa_sys.simulator.sweep import sweep
from nosa_sys.sparse_config import SparseConfig


@pytest.fixture
def model(make_process):
    process = make_process(recency=-0.4, beta=0.25, wildness=0.5, by_all=0.3)
    return FittedLocality("small", "tiny", (4096, 8192), {64: process, 32: make_process()}, {"documents": ["a"]})


def test_a_file_comes_back_as_written(model, tmp_path):
    path = tmp_path / "small.json"
    path.write_text(model.to_json())
    back = load_fitted(path)
    assert (back.name, back.model, back.contexts, back.provenance) == (
        "small",
        "tiny",
        (4096, 8192),
        {"documents": ["a"]},
    )
    assert sorted(back.processes) == [32, 64]
    for name in ("weights", "recency", "beta_correlation", "wildness"):
        assert np.allclose(getattr(back.processes[64], name), getattr(model.processes[64], name), atol=1e-4)
    assert back.to_json() == model.to_json()


@pytest.mark.parametrize(
    ("keys", "value", "text"),
    [
        (("kind",), "trace", "kind"),
        (("schema_version",), 2, "schema_version"),
        (("time_scales",), [1.0], "time_scales"),
        (("contexts",), [0, 10], "contexts"),
        (("processes",), {}, "no process"),
        (("processes", "64", "wildness"), [0.0], "wildness is of shape"),
        (("processes", "64", "wildness", 0), float("nan"), "wildness must lie"),
        (("processes", "64", "wildness", 0), "0.1; import os", "could not convert"),
        (("processes", "64", "weights", 0, 0), 0.9, "add up to 1"),
        (("processes", "64", "weights", 0, 0), -0.2, "weights must lie"),
        (("processes", "64", "n_layers"), 10**9, "n_layers"),
        (("processes", "64", "shared_by_all"), 1.5, "shared_by_all"),
        (("processes", "64", "shared_by_layer"), 0.8, "exceed 1"),
    ],
)
def test_broken_files_are_refused_by_what_is_wrong(model, tmp_path, keys, value, text):
    data = json.loads(model.to_json())
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=text):
        load_fitted(path)


def test_other_files_are_refused(model, tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_fitted(tmp_path / "none.json")
    path = tmp_path / "file.json"
    for text, message in (
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "kind"),
        ('{"kind": "locality"}', "missing"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_fitted(path)
    path.write_text(model.to_json() + " " * MAX_BYTES)
    with pytest.raises(ConfigError, match="more than the limit"):
        load_fitted(path)


def test_names_and_files_are_found(model, tmp_path):
    path = tmp_path / "own.json"
    path.write_text(model.to_json())
    assert get_locality(f"fitted:{path}").describe().startswith("small, fitted to tiny")
    assert get_locality("simple") == LocalityModel()
    for name in ("novels", "fitted:novels", "fitted:../../etc/passwd", f"fitted:{tmp_path}"):
        with pytest.raises(ConfigError, match="simple"):
            get_locality(name)


@pytest.mark.parametrize("name", ["smollm2-135m"])
def test_packaged_models_are_small_and_say_where_they_come_from(name):
    assert name in fitted_names()
    path = packaged_path(name)
    assert path.stat().st_size <= MAX_BYTES
    model = load_fitted(path)
    assert f"fitted:{name}" in locality_names()
    assert {32, 64, 128} <= set(model.processes)
    assert model.provenance["documents"]
    assert all(len(document["sha256"]) == 64 for document in model.provenance["documents"])
    assert "command" in model.provenance


def test_block_sizes_that_were_not_fitted_are_refused(model):
    with pytest.raises(ConfigError, match=r"block_size=128 was not fitted .*32, 64"):
        model.scores(ModelShape.preset("nosa-1b"), SparseConfig().with_block_size(128), 8192, np.random.default_rng(0))


def test_other_models_take_layers_by_depth_and_heads_in_turn(model):
    shape = ModelShape.preset("nosa-1b")  # 28 layers, 2 KV heads; 2 layers and 2 KV heads were fitted
    drawn = model.scores(shape, SparseConfig(), 8192, np.random.default_rng(5)).next_step(128)
    head = np.repeat([0, 2], 28) + np.tile([0, 1], 28)
    by_hand = model.processes[64].for_heads(np.repeat([0, 1], 14), np.array([0, 1]))
    expected = ScoreStream(by_hand, 128, 64, np.random.default_rng(5)).next_step(128)
    assert drawn.shape == (56, 128)
    assert np.array_equal(by_hand.weights, model.processes[64].weights[head])
    assert np.array_equal(drawn, expected)


def test_selections_from_it_keep_the_locality_bound(model):
    sparse = SparseConfig()
    drawn = synthetic_selections(ModelShape.preset("nosa-1b"), sparse, "nosa", context=8192, steps=70, model=model)
    history = drawn.history(64, "exact")
    assert 0 < history.n_misses[1:].max() <= 15
    assert np.nanmin(drawn.gamma()) >= 0.75
    assert np.isnan(drawn.gamma()[0]).all()


def test_predictions_use_it_and_say_so(model, tmp_path, tiny_shape):
    path = tmp_path / "own.json"
    path.write_text(model.to_json())
    work = SyntheticWorkload(tiny_shape, SparseConfig(), context=8192, batch=2, steps=12)
    settings = {"hardware": "ideal", "h2d_gbps": 50.0}
    found = simulate(work, locality=f"fitted:{path}", **settings)
    assert found.status == "projected"
    assert any("small, fitted to tiny" in rule for rule in found.rules)
    assert found.misses_per_head_step != simulate(work, **settings).misses_per_head_step
    assert found.to_dict() == simulate(work, locality=model, **settings).to_dict()


def test_sweeps_take_it_by_name(model, tmp_path):
    path = tmp_path / "own.json"
    path.write_text(model.to_json())
    synthetic = {"model_shape": "nosa-1b", "context": 5000, "steps": 6, "distinct_sequences": 1}
    recipe = {
        "name": "named",
        "base": {"synthetic": synthetic | {"locality": f"fitted:{path}"}},
        "hardware": "ideal",
        "h2d_gbps": 50.0,
        "axes": {"block_size": [64, 128], "slots": [1.0, 1.25]},
    }
    result = sweep(parse_recipe(recipe), tmp_path / "out", workers=1)
    rows = pq.read_table(result.results_path).to_pandas()
    assert (rows.refused.str.contains("block_size=128 was not fitted") == (rows.block_size == 128)).all()
    assert set(rows[rows.block_size == 64].status) == {"projected"}
    recipe["base"]["synthetic"]["locality"] = "fitted:nowhere"
    with pytest.raises(ConfigError, match="unknown locality model"):
        sweep(parse_recipe(recipe), tmp_path / "other", workers=1)


def test_models_load_without_torch():
    modules = ("registry", "fitting", "heldout")
    names = ", ".join(f"nosa_sys.simulator.locality.{module}" for module in modules)
    code = f"import sys, {names}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
