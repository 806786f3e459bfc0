"""Mass, rankings and misses of the selection ceiling against plain loops, and the ceiling against every other rule."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from nosa_sys.engine.prefill import prefill_logits
from nosa_sys.errors import ConfigError
from nosa_sys.experiments import selection_ceiling
from nosa_sys.experiments.block_rankings import LayerInputs, Rankings, Rule, block_mass, mass_inside, record, select
from nosa_sys.experiments.selection_ceiling import (
    RULES,
    Settings,
    beta_facts,
    measure,
    misses_a_step,
    places,
    rules_of,
    summarize,
)
from nosa_sys.experiments.selection_ceiling import (
    SPARSE as LARGE,
)
from tests.training.small import SHAPE, SPARSE, tiny, tokens

N_TOKENS = 230
SETTINGS = Settings(positions=40, run=24, stride=3, seed=1)
BLOCK, GROUP = SPARSE.block_size, SHAPE.n_q_heads // SHAPE.n_kv_heads
IDS = tokens(N_TOKENS, 5).tolist()


@pytest.fixture(scope="module")
def layer() -> LayerInputs:
    """The second layer of a random model, every query of it."""
    return record(tiny(seed=3), IDS, SPARSE, torch.arange(N_TOKENS))[1]


def loop_mass(layer: LayerInputs, biased: bool) -> np.ndarray:
    """[query, kv_head, block], token by token."""
    out = np.zeros((N_TOKENS, SHAPE.n_kv_heads, -(-N_TOKENS // BLOCK)))
    for p in range(N_TOKENS):
        for q_head in range(SHAPE.n_q_heads):
            head = q_head // GROUP
            logits = [float(layer.q[p, q_head] @ layer.k[t, head]) / math.sqrt(SHAPE.head_dim) for t in range(p + 1)]
            if biased:
                logits = [x + float(layer.beta[t, head]) for t, x in enumerate(logits)]
            total = sum(math.exp(x) for x in logits)
            for t, x in enumerate(logits):
                out[p, head, t // BLOCK] += math.exp(x) / total / GROUP
    return out


@pytest.fixture(scope="module")
def plain(layer: LayerInputs) -> np.ndarray:
    return loop_mass(layer, biased=False)


@pytest.fixture(scope="module")
def rankings(layer: LayerInputs, plain: np.ndarray) -> Rankings:
    every = torch.arange(N_TOKENS)
    return Rankings(layer, every, every[2::3], SPARSE, torch.from_numpy(plain).float(), seed=0)


def test_mass_of_blocks_token_by_token(layer: LayerInputs, plain: np.ndarray) -> None:
    every = torch.arange(N_TOKENS)
    np.testing.assert_allclose(block_mass(layer, every, BLOCK).numpy(), plain, atol=2e-6)
    biased = block_mass(layer, every, BLOCK, biased=True).numpy()
    np.testing.assert_allclose(biased, loop_mass(layer, biased=True), atol=2e-6)
    some = torch.tensor([3, 100, 229])
    few = LayerInputs(layer.q[some], layer.k, layer.v, layer.beta)
    np.testing.assert_allclose(block_mass(few, some, BLOCK).numpy(), plain[some], atol=2e-6)


def test_the_engines_own_selection(rankings: Rankings) -> None:
    """NOSA's rule is the prefill's selection, set by set, in the layer that was recorded."""
    values = {"scores": rankings.scores, "beta_max": rankings.beta_max()}
    found = select(Rule("NOSA"), values, rankings.n_blocks, SPARSE)
    engine = prefill_logits(tiny(seed=3), IDS, SPARSE).block_ids[1]
    assert torch.equal(found, engine)


def unforced(p: int) -> Iterator[int]:
    """Blocks that a query at p neither has in its window nor as a sink."""
    yield from range(SPARSE.init_blocks, max(SPARSE.init_blocks, p // BLOCK - SPARSE.local_blocks))


def test_ideal_orders_query_by_query(rankings: Rankings, plain: np.ndarray) -> None:
    grid = range(2, N_TOKENS, 3)
    later, unpicked = rankings.later_mass().numpy(), rankings.later_mass_unpicked().numpy()
    aged, past = rankings.later_mass_for_age().numpy(), rankings.past_mass().numpy()
    scores = rankings.scores.numpy()
    a = SPARSE.query_budget - SPARSE.n_forced
    assert a == 1
    for head in range(SHAPE.n_kv_heads):
        for j in range(1, N_TOKENS // BLOCK - 2):
            queries = [p for p in grid if j in unforced(p)]
            picked = {
                p: p >= SPARSE.topk_tokens and max(unforced(p), key=lambda i: scores[p, head, i]) == j for p in queries
            }
            assert later[0, head, j] == pytest.approx(np.mean([plain[p, head, j] for p in queries]), rel=1e-4)
            typical = [
                np.mean([plain[g, head, g // BLOCK - age] for g in grid if g // BLOCK - age in unforced(g)])
                for age in (p // BLOCK - j for p in queries)
            ]
            for_age = sum(plain[p, head, j] for p in queries) / sum(typical)
            assert aged[9, head, j] == pytest.approx(for_age, rel=1e-4)
            left = [0.0 if picked[p] else plain[p, head, j] for p in queries]
            assert unpicked[50, head, j] == pytest.approx(np.mean(left), rel=1e-4, abs=1e-7)
            for now in (150, 229):
                before = [p for p in grid if (j + 1) * BLOCK <= p < now]
                if before:
                    assert past[now, head, j] == pytest.approx(np.mean([plain[p, head, j] for p in before]), rel=1e-4)


def test_slope_of_recency(rankings: Rankings, plain: np.ndarray) -> None:
    """Against numpy's weighted line through log mean mass by age."""
    grid, found, aged = range(2, N_TOKENS, 3), rankings.later_mass_with_slope(), rankings.later_mass_for_age()
    for head in range(SHAPE.n_kv_heads):
        by_age: dict[int, list[float]] = {}
        for p in grid:
            for j in unforced(p):
                by_age.setdefault(p // BLOCK - j, []).append(plain[p, head, j])
        ages, counts = np.array(list(by_age)), np.array([len(x) for x in by_age.values()])
        line = np.polyfit(ages, np.log([np.mean(x) for x in by_age.values()]), 1, w=np.sqrt(counts))
        for j in (1, 5, 9):
            expected = math.log(float(aged[0, head, j])) - line[0] * j
            assert float(found[0, head, j]) == pytest.approx(expected, abs=1e-3)


def test_simple_rankings(rankings: Rankings, layer: LayerInputs) -> None:
    p, head, j = 200, 1, 4
    part = slice(j * BLOCK, (j + 1) * BLOCK)
    beta, norms = layer.beta[part, head], layer.k[part, head].norm(dim=1)
    assert float(rankings.beta_mean()[p, head, j]) == pytest.approx(float(beta.mean()), rel=1e-5)
    assert float(rankings.beta_log_sum_exp()[p, head, j]) == pytest.approx(math.log(float(beta.exp().sum())), rel=1e-5)
    assert float(rankings.large_key_norms()[p, head, j]) == pytest.approx(float(norms.mean()), rel=1e-5)
    assert torch.equal(rankings.small_key_norms(), -rankings.large_key_norms())
    recent = select(Rule("recent", "dma", fill="recent"), {"scores": rankings.scores, "recent": rankings.recent()},
                    rankings.n_blocks, SPARSE)  # fmt: skip
    c = p // BLOCK
    assert recent[p, head].tolist() == [0, c - 3, c - 2, c - 1, c]


def test_rank_correlation_of_betas(layer: LayerInputs, rankings: Rankings) -> None:
    found = beta_facts(rankings)
    part = slice(1, N_TOKENS // BLOCK - SPARSE.local_blocks)
    beta, later = rankings.beta_max()[-1, :, part].numpy(), rankings.later_mass()[-1, :, part].numpy()
    expected = [spearmanr(b, m).statistic for b, m in zip(beta, later, strict=True)]
    assert found["rank_correlation"] == pytest.approx(np.mean(expected), abs=1e-6)
    assert found["pooled_beta_std"] == pytest.approx(np.mean([np.std(b) for b in beta]), rel=1e-4)
    flat = LayerInputs(layer.q, layer.k, layer.v, torch.zeros_like(layer.beta))
    every = torch.arange(N_TOKENS)
    equal = beta_facts(Rankings(flat, every, every, SPARSE, rankings.mass, seed=0))
    assert equal == {"pooled_beta_std": 0.0, "rank_correlation": 0.0}


def test_no_rule_keeps_more_than_the_ceiling(layer: LayerInputs) -> None:
    """By query and head; and an ideal fill is better than a random one."""
    every = torch.arange(N_TOKENS)
    for biased in (False, True):
        mass = block_mass(layer, every, BLOCK, biased=biased)
        rankings = Rankings(layer, every, every, SPARSE, mass, seed=0)
        values = selection_ceiling._values(rankings, list(RULES), every)
        kept = {r.name: mass_inside(mass, select(r, values, rankings.n_blocks, SPARSE)) for r in RULES}
        best = kept["ceiling: best by true mass"]
        for name, inside in kept.items():
            assert (inside <= best + 1e-6).all(), name
        assert (
            mass.topk(SPARSE.topk, -1).values.sum(-1)[SPARSE.topk_tokens :] >= best[SPARSE.topk_tokens :] - 1e-6
        ).all()
        assert kept["fill: later mass (static, ideal)"].mean() > kept["fill: random order"].mean()
        assert kept["picks by true mass, fill by later mass"].mean() < best.mean()


def loop_misses(block_ids: np.ndarray, first: int, slots: int, warm_up: int) -> float:
    """A dictionary of last uses a stream; the current block is no load."""
    counts = []
    for by_step in block_ids.transpose(0, 2, 1, 3).reshape(-1, *block_ids.shape[1::2]):
        last: dict[int, int] = {}
        for step, ids in enumerate(by_step.tolist()):
            current = (first + step) // BLOCK
            new = [b for b in ids if b not in last]
            spare = sorted((b for b in last if b not in ids), key=last.__getitem__)
            for b in spare[: max(0, len(last) + len(new) - slots)]:
                del last[b]
            last |= dict.fromkeys(ids, step)
            if step >= warm_up:
                counts.append(sum(b != current for b in new))
    return float(np.mean(counts))


def test_misses_of_a_run() -> None:
    model, first, warm_up = tiny(seed=3), 120, 10
    engine = prefill_logits(model, IDS, SPARSE, first=first).block_ids
    ids = torch.stack(engine).numpy()
    found = misses_a_step(ids, first, SPARSE, warm_up)
    assert found["misses_1k"] == pytest.approx(loop_misses(ids, first, 5, warm_up))
    # blocks of one age leave by slot, which the loop does not know: a little room for it
    assert found["misses_1.25k"] == pytest.approx(loop_misses(ids, first, 7, warm_up), abs=0.02)
    assert 0 < found["misses_1.25k"] < found["misses_1k"] <= 1  # a = 1 query-aware pick


def test_a_document_and_its_summary() -> None:
    rows, betas = measure(tiny(seed=3), IDS, [SPARSE], SETTINGS)
    again, _ = measure(tiny(seed=3), IDS, [SPARSE], SETTINGS)
    assert rows == again
    assert [len(by_layer) for by_layer in betas.values()] == [SHAPE.n_layers] * 2
    summary = summarize([rows, measure(tiny(seed=3), tokens(N_TOKENS, 6).tolist(), [SPARSE], SETTINGS)[0]])
    by_rule = {(row["attention"], row["rule"]): row for row in summary}
    assert len(by_rule) == len(summary) == 2 * (len(rules_of(SPARSE)) + 1)
    nosa = by_rule["plain", "NOSA"]
    assert len(nosa["mass_by_layer"]) == SHAPE.n_layers
    assert nosa["mass"] == pytest.approx(np.mean(nosa["mass_by_document"]))
    assert by_rule["plain", "DMA"]["misses_1k"] == 0
    assert by_rule["plain", "fill: later mass (static, ideal)"]["misses_1k"] <= 1
    assert "misses_1k" not in by_rule["plain", selection_ceiling.ANY_BLOCKS]
    for (kind, _), row in by_rule.items():
        assert row["mass"] <= by_rule[kind, selection_ceiling.ANY_BLOCKS]["mass"] + 1e-9


def test_mass_of_nosa_is_what_the_evaluation_reports() -> None:
    """The same positions, drawn alike, through ``score_document``."""
    from nosa_sys.training.scoring import score_document

    every = Settings(positions=N_TOKENS - N_TOKENS // 2, run=24, stride=3)
    where = places(N_TOKENS, SPARSE, every)
    assert where.positions[where.drawn].tolist() == list(range(115, 230))
    rows, _ = measure(tiny(seed=3), IDS, [SPARSE], every)
    nosa = next(row for row in rows if row["rule"] == "NOSA" and row["attention"] == "plain")
    late = score_document(tiny(seed=3), IDS, SPARSE, mass_positions=1000).dense_mass
    assert late is not None
    n_early = 115 - SPARSE.topk_tokens
    early = score_document(tiny(seed=3), IDS[:115], SPARSE, mass_positions=1000).dense_mass
    assert early is not None
    both = (n_early * early + 115 * float(np.mean(nosa["mass_by_layer"]))) / (n_early + 115)
    assert both == pytest.approx(late, rel=1e-5)


def test_rules_with_budgets_of_their_own() -> None:
    by_name = {rule.name: rule.budgets(LARGE) for rule in rules_of(LARGE)}
    assert by_name["NOSA"] == LARGE
    assert [by_name[f"NOSA, select {n}"].select_blocks for n in (9, 10, 12, 16)] == [9, 10, 12, 16]
    assert [by_name[f"NOSA, window {n}"].local_blocks for n in (12, 16, 23)] == [12, 16, 23]
    assert {cfg.topk for cfg in by_name.values()} == {32}
    assert [rule.name for rule in rules_of(LARGE.with_topk(16)) if "NOSA, " in rule.name] == [
        "NOSA, select 5", "NOSA, select 6", "NOSA, select 8", "NOSA, window 6", "NOSA, window 8", "NOSA, window 11"
    ]  # fmt: skip


def test_documents_that_are_too_short() -> None:
    with pytest.raises(ConfigError, match="longer context"):
        places(150, SPARSE, SETTINGS)
    with pytest.raises(ConfigError, match="run=900"):
        places(1000, SPARSE, Settings(positions=4, run=900))
