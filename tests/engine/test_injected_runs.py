"""Engines that play injected sets: what is selected, missed, moved and recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from nosa_sys.engine.decode import copy_one_by_one
from nosa_sys.engine.engine import Engine
from nosa_sys.engine.injection import Injection, synthetic_injection
from nosa_sys.engine.recorder import Recorder
from nosa_sys.errors import ConfigError
from nosa_sys.kernels.block_fetch.reference import fetch_blocks
from nosa_sys.traces.check import check_trace
from nosa_sys.traces.reader import Trace
from tests.engine.helpers import NAN, SMALL, tiny_model

CONTEXTS = [90, 33, 150, 6]
N_STEPS = 24


def sets_for(model) -> Injection:
    shape = model.shape
    return synthetic_injection(SMALL, "nosa", shape.n_layers, shape.n_kv_heads, CONTEXTS, N_STEPS, 1.5, seed=4)


@pytest.mark.parametrize("runner", ["eager", "kernels"])
def test_the_sets_are_what_is_selected_missed_and_recorded(runner: str, tmp_path: Path) -> None:
    model = tiny_model(8)
    injection = sets_for(model)
    plans = []
    with Recorder(tmp_path) as recorder:
        engine = Engine(
            model, SMALL, max_batch=4, runner=runner, injection=injection, recorder=recorder, inspect=True, poison=NAN
        )
        engine.fill_synthetic(CONTEXTS, seed=2, max_new_tokens=N_STEPS)
        while not engine.idle:
            engine.step()
            plans.append(engine.last_plan)
    misses, _ = injection.fresh_counts(1, N_STEPS, SMALL)
    assert misses.sum() > 0
    assert np.array_equal(np.stack([plan.n_misses for plan in plans[1:]]), misses.numpy())
    for step, plan in enumerate(plans):
        assert np.array_equal(plan.block_ids, injection.ids_table[step].numpy())
        for (layer, row, head, place), block in np.ndenumerate(plan.block_ids):
            current = (CONTEXTS[row] - 1 + step) // SMALL.block_size
            expected = 2
            if block < 0:
                expected = -1
            elif current + 1 <= SMALL.topk:
                expected = 4
            elif block >= current - SMALL.local_blocks:
                expected = 1
            elif block < SMALL.init_blocks:
                expected = 0
            assert plan.origins[layer, row, head, place] == expected
    report = check_trace(Trace.open(tmp_path))
    assert report.ok, report.to_dict()


def test_a_run_past_the_sets_is_refused() -> None:
    model = tiny_model(8)
    engine = Engine(model, SMALL, max_batch=4, injection=sets_for(model))
    engine.fill_synthetic(CONTEXTS, max_new_tokens=N_STEPS + 1)
    with pytest.raises(ConfigError, match=f"past the {N_STEPS} injected steps"):
        engine.run()


def test_what_does_not_go_with_injected_sets_is_refused() -> None:
    model = tiny_model(8)
    for match, options in (
        ("batch of 4", {"max_batch": 3}),
        ("without scores", {"max_batch": 4, "record_scores": True}),
        ("attends to everything", {"max_batch": 4, "method": "full"}),
    ):
        with pytest.raises(ConfigError, match=match):
            Engine(model, SMALL, injection=sets_for(model), **options)


def test_copies_one_by_one_are_the_fetch() -> None:
    rng = torch.Generator().manual_seed(3)
    host = torch.randn(12, 2, 4, 8, generator=rng)
    host_rows, slot_rows = torch.tensor([11, 0, 7, 7]), torch.tensor([2, 5, 0, 4])
    found, expected = torch.zeros(6, 2, 4, 8), torch.zeros(6, 2, 4, 8)
    copy_one_by_one(host, found, host_rows, slot_rows)
    fetch_blocks(host, expected, host_rows, slot_rows)
    assert torch.equal(found, expected)
    assert torch.equal(found[2], host[11])
