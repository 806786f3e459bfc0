"""Targets of a fitted head against a plain loop, and whether the fit finds what it is made of."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nosa_sys.errors import ConfigError
from nosa_sys.experiments.block_rankings import LayerInputs, record
from nosa_sys.experiments.head_fit import fit_delta, fit_head, main, token_targets
from nosa_sys.kernels.eviction_head.reference import eviction_beta
from nosa_sys.models.weights import head_tensors
from tests.training.small import SHAPE, SPARSE, tiny, tokens

N_TOKENS, BLOCK = 120, SPARSE.block_size
POSITIONS = torch.arange(3, N_TOKENS, 4)


@pytest.fixture(scope="module")
def layers() -> list[LayerInputs]:
    return record(tiny(seed=3), tokens(N_TOKENS, 5).tolist(), SPARSE, POSITIONS)


def test_targets_query_by_query(layers: list[LayerInputs]) -> None:
    inputs, group = layers[1], SHAPE.n_q_heads // SHAPE.n_kv_heads
    found = token_targets(inputs, POSITIONS, SPARSE).numpy()
    for head in range(SHAPE.n_kv_heads):
        got: dict[int, list[tuple[int, float]]] = {}
        for row, p in enumerate(POSITIONS.tolist()):
            shares = np.zeros(p + 1)
            for q_head in range(head * group, (head + 1) * group):
                logits = (inputs.k[: p + 1, head] @ inputs.q[row, q_head] / math.sqrt(SHAPE.head_dim)).double().numpy()
                shares += np.exp(logits) / np.exp(logits).sum() / group
            for t in range(BLOCK, (p // BLOCK - SPARSE.local_blocks) * BLOCK):
                got.setdefault(t, []).append((p // BLOCK - t // BLOCK, shares[t]))
        by_age: dict[int, list[float]] = {}
        for pairs in got.values():
            for age, share in pairs:
                by_age.setdefault(age, []).append(share)
        for t in range(N_TOKENS):
            if t not in got:
                assert np.isnan(found[t, head])
                continue
            expected = sum(s for _, s in got[t]) / sum(np.mean(by_age[age]) for age, _ in got[t])
            assert found[t, head] == pytest.approx(expected, rel=1e-4)


def test_the_fit_finds_a_head() -> None:
    """Targets made of softplus(true . v): the betas of the fit rank tokens that it did not see in the same order."""
    generator = torch.Generator().manual_seed(0)
    v, true = torch.randn(3000, 16, generator=generator), torch.randn(2, 16, generator=generator) * 0.5
    delta = fit_delta(v[:2000] * 7, F.softplus(v[:2000] @ true.T) * torch.tensor([0.1, 30.0]), decay=1e-4)
    found, wanted = F.softplus(v[2000:] * 7 @ delta.T), v[2000:] @ true.T
    for head in range(2):
        both = torch.stack([found[:, head], F.softplus(wanted[:, head])])
        assert float(both.corrcoef()[0, 1]) > 0.97


def test_a_fitted_head_has_the_spread_asked_for(layers: list[LayerInputs]) -> None:
    head = fit_head([layers, layers], POSITIONS, SPARSE, decay=0.03, beta_std=0.05)
    assert {name: tuple(tensor.shape) for name, tensor in head.items()} == dict(head_tensors(SHAPE))
    counted = slice(BLOCK, (int(POSITIONS[-1]) // BLOCK - SPARSE.local_blocks) * BLOCK)
    for layer, inputs in enumerate(layers):
        prefix = f"model.layers.{layer}.self_attn"
        beta = eviction_beta(inputs.v.flatten(1), head[f"{prefix}.A"], head[f"{prefix}.delta.weight"])[counted]
        assert beta.repeat(2, 1).std(0).tolist() == pytest.approx([0.05] * SHAPE.n_kv_heads, rel=1e-3)
        targets = token_targets(inputs, POSITIONS, SPARSE)[counted]
        for kv_head in range(SHAPE.n_kv_heads):  # the same document: the fit follows its targets
            assert float(torch.stack([beta[:, kv_head], targets[:, kv_head]]).corrcoef()[0, 1]) > 0.3


def test_documents_within_the_window() -> None:
    short = record(tiny(seed=3), tokens(20).tolist(), SPARSE, torch.arange(20))
    with pytest.raises(ConfigError, match="longer than the window"):
        fit_head([short], torch.arange(20), SPARSE, decay=0.03, beta_std=0.05)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--documents", "0"), "--documents 0 must be >= 1"),
        (("--stride", "0"), "--stride 0 must be >= 1"),
        (("--context", "0"), "--context 0 must be >= 2"),
        (("--beta-std", "nan"), "--beta-std nan must be finite"),
    ],
)
def test_numbers_that_fit_nothing(
    option: tuple[str, str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["head_fit", "--texts", "texts", "--out", str(tmp_path / "out"), *option])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert said in capsys.readouterr().err


def test_a_run_in_the_place_asked_for_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "summary.json").write_text("{}")
    monkeypatch.setattr("sys.argv", ["head_fit", "--texts", "texts", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "already exists; give --overwrite" in capsys.readouterr().err
    assert (tmp_path / "summary.json").exists()
