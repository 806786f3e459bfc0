"""Where a value comes from: flag over file over base, and token budgets against block budgets."""

from __future__ import annotations

from pathlib import Path

import pytest

from nosa_sys.cli.budgets import resolve_budgets
from nosa_sys.cli.decode_progress import LiveRate
from nosa_sys.cli.options import BudgetFlags
from nosa_sys.cli.settings import Settings, read_yaml_mapping
from nosa_sys.errors import ConfigError
from nosa_sys.sparse_config import SparseConfig
from tests.cli.conftest import Nosa


def resolve(flags: BudgetFlags, file: dict[str, int] | None = None, base: SparseConfig | None = None) -> SparseConfig:
    return resolve_budgets(flags, Settings(file or {}), base or SparseConfig(), "default")


def test_case_28_a_default_never_hides_the_files_value(nosa: Nosa, trace: Path, tmp_path: Path) -> None:
    """Case 28: the file says 25 GB/s and the flag is absent: 25; the flag says 50 too: 50; each with its origin."""
    config = tmp_path / "config.yaml"
    config.write_text("h2d_gbps: 25\n")
    common = ("simulate", trace, "--hardware", "ideal", "--config", config, "--json")
    from_file, from_flag = nosa(*common), nosa(*common, "--h2d-gbps", 50)
    assert from_file.status == 0, from_file.err
    assert from_file.document["options"]["h2d_gbps"] == {"value": 25.0, "origin": "file"}
    assert from_flag.document["options"]["h2d_gbps"] == {"value": 50.0, "origin": "flag"}
    assert from_file.document["settings"]["h2d_gbps"] == 25.0
    assert from_flag.document["settings"]["h2d_gbps"] == 50.0
    assert from_file.document["step_time_us"] == pytest.approx(2 * from_flag.document["step_time_us"], rel=1e-12)
    assert "file" in from_file.err, "the banner names the origin"


def test_case_28_a_rotary_base_has_its_origin_and_is_checked_by_a_dry_run(
    nosa: Nosa, checkpoint: Path, prompt: Path, tmp_path: Path
) -> None:
    """Case 28: none, the file's, the flag's; 0 is a value, and no word for the model's own."""
    config = tmp_path / "config.yaml"
    config.write_text("rope_theta: 400000\n")
    common = ("generate", "--model", checkpoint, "--prompt-file", prompt, "--dry-run", "--json")
    for flags, value, origin in (
        ((), "as the adapter's record or the model has", "default"),
        (("--config", config), 400000.0, "file"),
        (("--config", config, "--rope-theta", 5e5), 500000.0, "flag"),
    ):
        result = nosa(*common, *flags)
        assert result.status == 0, result.err
        assert result.document["options"]["rope_theta"] == {"value": value, "origin": origin}
    refused = nosa(*common, "--rope-theta", 0)
    assert refused.status == 2
    assert "rope_theta=0.0 must be a finite number > 0" in refused.err


def test_blocks_and_tokens_name_the_same_budgets() -> None:
    blocks = resolve(BudgetFlags(block_size=32, topk=32, init_blocks=2, window_blocks=8, select_blocks=4))
    tokens = resolve(BudgetFlags(block_size=32, topk_tokens=1024, init_tokens=64, window_size=256, select_tokens=128))
    assert blocks == tokens == SparseConfig(32, 32, 16, 32, 2, 256, 4)


def test_flag_wins_over_the_file_in_another_unit() -> None:
    assert resolve(BudgetFlags(topk_tokens=8192), {"topk": 64}).topk == 128
    assert resolve(BudgetFlags(topk=96), {"topk_tokens": 4096}).topk == 96
    assert resolve(BudgetFlags(window_blocks=2), {"window_size": 512}).window_size == 128
    assert resolve(BudgetFlags(select_blocks=20), {"k_e": 60}).select_blocks == 20
    assert resolve(BudgetFlags(k_e=40), {"select_blocks": 4}).select_blocks == 24


def test_another_block_size_keeps_the_token_budgets() -> None:
    config = resolve(BudgetFlags(block_size=128))
    assert (config.topk, config.select_blocks, config.window_size, config.init_blocks) == (32, 8, 1024, 1)


def test_both_units_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="only one"):
        resolve(BudgetFlags(select_blocks=4, select_tokens=256))
    with pytest.raises(ConfigError, match="only one"):
        resolve(BudgetFlags(), {"window_size": 128, "window_blocks": 2})
    with pytest.raises(ConfigError, match="only one"):
        resolve(BudgetFlags(k_e=40, select_blocks=4))


def test_yaml_files_are_checked_key_by_key(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("topkk: 3\n")
    with pytest.raises(ConfigError, match=r"'topkk'.*did you mean 'topk'"):
        read_yaml_mapping(path, ["topk", "slots"])
    path.write_text("a: [1\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_yaml_mapping(path, ["a"])
    path.write_text("- a\n")
    with pytest.raises(ConfigError, match="mapping"):
        read_yaml_mapping(path, ["a"])
    path.write_text("topk: many\n")
    with pytest.raises(ConfigError, match=r"topk='many'.*int"):
        resolve(BudgetFlags(), read_yaml_mapping(path, ["topk"]))
    path.write_text("")
    assert read_yaml_mapping(path, ["a"]) == {}


def test_exponents_without_a_point_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("rope_theta: 4e5\ntemperature: 1E-1\nmodel: 12e\nprompt: 0x1e3\n")
    found = read_yaml_mapping(path, ("rope_theta", "temperature", "model", "prompt"))
    assert found == {"rope_theta": 4e5, "temperature": 0.1, "model": "12e", "prompt": 0x1E3}
    path.write_text("rope_theta: 1e999\n")
    assert read_yaml_mapping(path, ("rope_theta",)) == {"rope_theta": float("inf")}


def test_live_rate_looks_back_two_seconds() -> None:
    rate = LiveRate()
    assert rate.at(10.0, 0) is None
    assert rate.at(11.0, 10) == pytest.approx(10.0)
    for second in range(12, 20):
        value = rate.at(float(second), 10 + 4 * (second - 11))
    assert value == pytest.approx(4.0), "the fast first second is forgotten"
