"""The comparison of selections: equal engines give equal sets, and a near tie is told from a far one."""

from __future__ import annotations

import dataclasses

import numpy as np

from nosa_sys.experiments.tie_check import TieReport, compare, pooled_scores
from tests.engine.helpers import SMALL, random_tokens, tiny_model


def test_equal_engines_have_no_block_apart() -> None:
    model = tiny_model(2)
    report = compare(model, model, SMALL, [random_tokens(200, 1), random_tokens(140, 2)], 12, runner="kernels")
    assert report.n_sets == 12 * 2 * 2 * 2
    assert report.n_equal == report.n_sets
    assert report.n_blocks_apart == 0


def test_gaps_are_those_of_the_blocks_apart() -> None:
    from nosa_sys.engine.engine import Engine

    engine = Engine(tiny_model(2), SMALL, inspect=True, record_scores=True)
    engine.add(random_tokens(200, 1), 3)
    engine.step()
    plan = engine.last_plan
    ids, origins = plan.block_ids.copy(), plan.origins.copy()
    picks = np.argwhere(origins[0, 0, 0] == 2).ravel()
    taken = ids[0, 0, 0][picks]
    others = [b for b in range(plan.batch.blocks[0]) if b not in ids[0, 0, 0]]
    ids[0, 0, 0][picks[0]] = others[0]
    report = TieReport()
    report.add(dataclasses.replace(plan, block_ids=ids), plan, SMALL)
    scores = pooled_scores(plan, SMALL)[0, 0, 0]
    last = scores[taken].min()
    expected = max(abs(scores[b] / last - 1) for b in (others[0], taken[0]))
    assert report.n_blocks_apart == 2
    assert report.n_equal == report.n_sets - 1
    assert abs(report.largest_gap - expected) < 1e-6
