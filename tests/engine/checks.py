"""Hold watched rows against the oracle: logits, selections, misses."""

from __future__ import annotations

import numpy as np

from nosa_sys.engine.engine import Engine
from tests.engine.helpers import Row
from tests.engine.oracle import OracleRun, ResidencyOracle


def assert_rows_match(rows: list[Row], oracle: OracleRun, atol: float = 1e-9) -> None:
    """Logits within ``atol`` and equal selections at every row; rows follow one another without a gap."""
    for row in rows:
        np.testing.assert_allclose(row.logits, oracle.logits[row.position], rtol=0, atol=atol)
        assert row.selected == oracle.selected[row.position], f"position {row.position}"
    assert [r.position for r in rows] == list(range(rows[0].position, rows[0].position + len(rows)))
    assert [r.cold for r in rows] == [True] + [False] * (len(rows) - 1)


def assert_misses_match(rows: list[Row], oracle: OracleRun, engine: Engine) -> int:
    """Misses of every layer and head equal the dictionary model's; returns their sum."""
    if not engine.memory.offload:
        assert all(m == 0 for row in rows for layer in row.misses for m in layer)
        return 0
    size, total = engine.sparse.block_size, 0
    for layer in range(engine.model.n_layers):
        for head in range(engine.model.shape.n_kv_heads):
            model = ResidencyOracle(engine.slots, engine.policy.name)
            model.start(rows[0].position, size)
            for row in rows:
                betas = oracle.pooled_betas[row.position][layer][head]
                expected = model.step(row.selected[layer][head], row.position // size, row.step, betas)
                assert row.misses[layer][head] == expected, f"position {row.position}, layer {layer}, head {head}"
                total += expected
    return total


def assert_loads_bounded(rows: list[Row], engine: Engine) -> None:
    """Every row but the cold one loads at most min(a, max(0, N - k)) blocks a head, with slots = k."""
    for row in rows[1:]:
        n_blocks = row.position // engine.sparse.block_size + 1
        bound = engine.method.max_loads(engine.sparse, n_blocks)
        assert max(m for layer in row.misses for m in layer) <= bound, f"position {row.position}"
