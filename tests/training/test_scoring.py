"""Scores of documents against oracles of their own, and against what the engine really loads when it decodes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nosa_sys.engine.engine import Engine
from nosa_sys.errors import ConfigError
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.training.scoring import score_document
from nosa_sys.training.statistics import exponential, interval
from tests.training.small import SHAPE, SPARSE, tiny, tokens


def test_loss_and_matches_equal_a_dense_models() -> None:
    model, ids = tiny("float64"), tokens(90)
    score = score_document(model, ids.tolist(), SPARSE, method="full", chunk=32)
    chances = model.dense_logits(ids).log_softmax(-1)[:-1]
    np.testing.assert_allclose(score.loss, -chances[torch.arange(89), ids[1:]].numpy(), rtol=1e-9)
    assert (score.matches == (chances.argmax(-1) == ids[1:]).numpy()).all()
    assert score.misses.sum() == score.selected.sum() == 0
    assert score.dense_mass is None


@pytest.mark.parametrize("method", ["nosa", "infllmv2", "dma"])
@pytest.mark.parametrize("chunk", [48, 512])
def test_misses_and_gamma_are_those_of_decoding(method: str, chunk: int) -> None:
    """The engine decodes the same 60 tokens, forced, with slots = k: it must load exactly as many blocks."""
    model, ids, prompt = tiny("float64"), tokens(190).tolist(), 130
    score = score_document(model, ids, SPARSE, method=method, chunk=chunk)
    engine = Engine(model, SPARSE, method=method, inspect=True)
    engine.add(ids[:prompt], 60, force_tokens=ids[prompt:])
    loaded, kept, before = {}, {}, None
    while not engine.idle:
        engine.step()
        plan = engine.last_plan
        assert plan is not None
        assert plan.block_ids is not None
        position = plan.batch.positions[0]
        sets = [[set(row.tolist()) - {-1} for row in layer[0]] for layer in plan.block_ids]
        if before is not None:
            loaded[position] = int(plan.n_misses.sum())
            kept[position] = sum(
                len(a & b) for x, y in zip(sets, before, strict=True) for a, b in zip(x, y, strict=True)
            )
        before = sets
    assert len(loaded) == 59
    assert [score.misses[p] for p in sorted(loaded)] == [loaded[p] for p in sorted(loaded)]
    assert [score.kept[p] for p in sorted(kept)] == [kept[p] for p in sorted(kept)]
    assert (sum(loaded.values()) > 0) == (method != "dma")
    assert set(score.selected[SPARSE.topk_tokens :]) == {SPARSE.topk * SHAPE.n_layers * SHAPE.n_kv_heads}


def test_dense_mass_and_recall_by_formulas_of_their_own() -> None:
    """One layer: its inputs do not depend on the method. Mass of every sparse position, token by token, and how many of
    the blocks that hold most of a KV head's mass were selected."""
    import dataclasses

    from nosa_sys.methods import get_method
    from nosa_sys.models.random import random_model
    from nosa_sys.training.attention import select

    model = random_model(dataclasses.replace(SHAPE, n_layers=1), 0, "float64")
    ids = tokens(130)
    q, k, _, beta = model.attention_inputs(0, model.embed(ids))
    q, k = model.rope(q, k, torch.arange(130))
    selected = select(q, k, beta, SPARSE, get_method("nosa"))
    assert selected is not None
    blocks = selected.block_ids
    shares, found = [], []
    for p in range(80, 130):
        by_block = np.zeros((2, 9))
        for head in range(4):
            weights = (k[: p + 1, head // 2] @ q[p, head] / math.sqrt(8)).softmax(0)
            chosen = {int(j) for j in blocks[p, head // 2] if j >= 0}
            shares.append(sum(float(weights[t]) for t in range(p + 1) if t // 16 in chosen))
            for t in range(p + 1):
                by_block[head // 2, t // 16] += float(weights[t])
        for head in range(2):
            best = {int(j) for j in np.argsort(-by_block[head])[:5]}
            found.append(len(best & {int(j) for j in blocks[p, head]}) / 5)
    score = score_document(model, ids.tolist(), SPARSE, mass_positions=1000, chunk=40)
    assert score.dense_mass == pytest.approx(np.mean(shares), rel=1e-5)
    assert 0.3 < score.dense_mass < 0.999
    assert score.recall == pytest.approx(np.mean(found))
    assert 0.4 < score.recall < 0.95
    some = score_document(model, ids.tolist(), SPARSE, mass_positions=5, seed=1)
    assert some.dense_mass != pytest.approx(score.dense_mass, rel=1e-3)


@pytest.mark.parametrize("method", ["nosa", "infllmv2", "dma"])
def test_tokens_in_place_of_blocks(method: str) -> None:
    """Blocks of one token, windows of two: every set, its misses and its perplexity, one query at a time in float64."""
    import dataclasses

    from nosa_sys.methods import get_method
    from nosa_sys.models.random import random_model

    model, rule = random_model(dataclasses.replace(SHAPE, n_layers=1), 0, "float64"), get_method(method)
    ids, sparse = tokens(70), SparseConfig(1, 2, 1, topk=24, init_blocks=2, window_size=8, select_blocks=6)
    q, k, v, beta = model.attention_inputs(0, model.embed(ids))
    q, k = model.rope(q, k, torch.arange(70))
    used = beta if rule.uses_beta else torch.zeros_like(beta)
    free = {"nosa": 16 - 11, "infllmv2": 24 - 11, "dma": 0}[method]
    attended, before, misses = torch.zeros(70, 4, 8, dtype=torch.float64), [set(), set()], []
    for p in range(70):
        loaded = 0
        for head in range(2):
            sets = set(range(p + 1))
            if p + 1 > 24:
                forced = {0, 1, *range(p - 8, p + 1)}
                candidates = sorted(sets - forced)
                means = torch.stack([(k[i, head] + k[i + 1, head]) / 2 for i in range(p)])
                scores = sum((means @ q[p, h] / math.sqrt(8)).softmax(0) for h in (2 * head, 2 * head + 1))
                by_query = {j: float(max(scores[i] for i in (j - 1, j) if 0 <= i < p)) for j in candidates}
                query_aware = set(sorted(candidates, key=lambda j: (-by_query[j], j))[:free])
                betas = (beta[:-1, head] + beta[1:, head]) / 2
                by_beta = {j: float(max(betas[i] for i in (j - 1, j) if 0 <= i < p)) for j in candidates}
                rest = sorted(set(candidates) - query_aware, key=lambda j: (-by_beta[j], j))
                sets = forced | query_aware | set(rest[: 24 - len(forced | query_aware)])
            chosen = sorted(sets)
            for h in (2 * head, 2 * head + 1):
                weights = (k[chosen, head] @ q[p, h] / math.sqrt(8) + used[chosen, head]).softmax(0)
                attended[p, h] = weights @ v[chosen, head]
            loaded += len(sets - before[head] - {p})
            before[head] = sets
        misses.append(loaded)
    x = model.attention_output(0, model.embed(ids), attended)
    loss = -model.logits(x).log_softmax(-1)[torch.arange(69), ids[1:]]
    score = score_document(model, ids.tolist(), sparse, method=method, hot_slots=30, mass_positions=9, chunk=32)
    np.testing.assert_allclose(score.loss, loss.numpy(), rtol=1e-9)
    assert score.misses.tolist() == misses[:69]
    assert (sum(misses) > 0) == (method != "dma")
    assert score.hot_misses is not None
    assert score.hot_misses.sum() <= score.misses.sum()


def test_short_documents() -> None:
    score = score_document(tiny(), [1, 2], SPARSE, mass_positions=3)
    assert len(score.loss) == 1
    assert score.dense_mass is None
    with pytest.raises(ConfigError, match="at least 2"):
        score_document(tiny(), [1], SPARSE)
    for chunk in (0, -1):
        with pytest.raises(ConfigError, match=f"chunk={chunk} must be >= 1"):
            score_document(tiny(), [1, 2], SPARSE, chunk=chunk)
    for slots in (-1, SPARSE.topk - 1):
        with pytest.raises(ConfigError, match=f"hot_slots={slots} cannot hold"):
            score_document(tiny(), [1, 2], SPARSE, hot_slots=slots)


# ---- intervals
def test_intervals_cover_the_truth() -> None:
    """95 % intervals of a mean of 30 draws: between 88 and 99 % of 300 hold it."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        counts = rng.integers(50, 150, 30)
        found = interval(counts * rng.normal(2.0, 1.0, 30), counts, resamples=400)
        hits += found.low <= 2.0 <= found.high
    assert 264 <= hits <= 297


def test_intervals_weigh_documents_and_refuse_none() -> None:
    found = interval([1.0, 30.0], [1, 10])
    assert found.value == pytest.approx(31 / 11)
    assert (found.low, found.high) == (1.0, 3.0)
    assert math.isnan(interval([1.0], [2]).low)
    assert exponential(interval([2.0, 2.0], [1, 1])) == pytest.approx((math.exp(2),) * 3)
    with pytest.raises(ConfigError, match="at least one document"):
        interval([], [])
