"""Where a sweep runs changes no byte: workers, hash seeds, joblib and Ray."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nosa_sys.errors import ConfigError
from nosa_sys.simulator.recipe import parse_recipe
from nosa_sys.simulator.sweep import sweep
from tests.simulator.sweep_recipes import RECIPE, changed, rows_of

SCRIPT = """
import sys
from nosa_sys.simulator.recipe import load_recipe
from nosa_sys.simulator.sweep import sweep
if __name__ == "__main__":
    sweep(load_recipe(sys.argv[1]), sys.argv[2], workers=int(sys.argv[3]), backend=sys.argv[4])
"""


EVERYTHING = {
    "schedule": "two_batch",
    "dequant_gbps": 500.0,
    "axes": {"link": ["own", "pcie4-x16"], "host_kv_dtype": ["bf16", "int4"], "slots": [1.0, "1.5x"]},
    "sobol": {"points": 9, "batch": {"low": 1, "high": 12, "log": True}, "h2d_gbps": {"low": 10, "high": 60}},
}
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="the extra nosa-sys[ray] is not installed"
)


def run_in_a_process(tmp_path, data, name, hash_seed, workers, backend):
    """(results, summary) as bytes, from a process of its own that stands in ``tmp_path``."""
    (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(data))
    (tmp_path / "run.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    arguments = [sys.executable, "run.py", f"{name}.yaml", name, str(workers), backend]
    subprocess.run(arguments, env=environment, check=True, cwd=tmp_path, capture_output=True)
    return [(tmp_path / name / file).read_bytes() for file in ("results.parquet", "summary.json")]


def test_same_bytes_whatever_the_hash_seed_and_the_workers(tmp_path):
    data = changed(**EVERYTHING)
    one = run_in_a_process(tmp_path, data, "one", "0", 1, "joblib")
    assert one == run_in_a_process(tmp_path, data, "two", "4711", 2, "joblib")


@needs_ray
def test_ray_gives_the_bytes_of_one_process_on_a_trace_named_by_a_relative_path(tmp_path, write_trace):
    """Rows that are refused quote the trace's path as it was written, wherever they were worked out."""
    write_trace(tmp_path / "trace", steps=8)
    axes = {"slots": [6, 9], "select_blocks": [1, 2], "batch": [1, 2]}
    data = {"name": "t", "base": {"trace": "trace"}, "hardware": "h200-provisional", "axes": axes}
    one = run_in_a_process(tmp_path, data, "one", "0", 1, "joblib")
    assert one == run_in_a_process(tmp_path, data, "cluster", "4711", 2, "ray")
    assert any("trace trace carries no scores" in r["refused"] for r in rows_of(tmp_path / "cluster"))


def test_backends_that_are_not_there_are_refused_before_any_work(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="backend='dask' must be one of joblib, ray"):
        sweep(parse_recipe(RECIPE), tmp_path / "out", backend="dask")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'nosa-sys\[ray\]'"):
        sweep(parse_recipe(RECIPE), tmp_path / "out", backend="ray")
    assert not (tmp_path / "out").exists()
