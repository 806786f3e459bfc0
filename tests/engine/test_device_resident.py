"""KV in pages on the device against the plain-loop oracle, and against the same run with offload."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys.engine import prefill as prefill_module
from nosa_sys.engine.block_stream import consecutive_runs
from nosa_sys.engine.engine import Engine
from nosa_sys.engine.memory import Memory
from nosa_sys.engine.prefill import PrefillCost, PrefillOutput, PrefillRunner, prefill_logits, prefill_only
from nosa_sys.errors import NumericsError
from nosa_sys.methods import get_method
from tests.engine.checks import assert_rows_match
from tests.engine.helpers import METHODS, NAN, SMALL, TINY, Row, Watch, random_tokens, tiny_model
from tests.engine.oracle import run_oracle

SPARSE_METHODS = ("nosa", "infllmv2", "dma")


@pytest.mark.parametrize("method", METHODS)
def test_decode_from_pages_equals_oracle(method: str) -> None:
    """Prompts around block edges in one batch; lanes and pages change hands; nothing crosses, poison is never read."""
    model = tiny_model(31)
    engine = Engine(model, SMALL, method=method, offload=False, prefill_chunk=24, max_batch=3, poison=NAN)
    lengths, new = (1, 15, 16, 17, 63, 100, 128), 40
    texts = [random_tokens(n + new, seed=n) for n in lengths]
    ids = [engine.add(t[:n], new, force_tokens=t[n:]) for t, n in zip(texts, lengths, strict=True)]
    rows = Watch(engine).run()
    for sequence, text in zip(ids, texts, strict=True):
        assert_rows_match(rows[sequence], run_oracle(model, SMALL, method, text))
        assert not any(m for row in rows[sequence] for layer in row.misses for m in layer)
    summary = engine.summary()
    assert (summary["blocks_loaded"], summary["h2d_bytes"], summary["d2h_bytes"]) == (0, 0, 0)
    assert (summary["prefill_h2d_bytes"], summary["prefill_d2h_bytes"], summary["host_pool_bytes"]) == (0, 0, 0)
    assert summary["device_slot_bytes"] == engine.memory.pool.allocated_bytes > 0
    assert engine.memory.slots is None
    assert engine.memory.pool.pages_in_use == 0


def run(method: str, text: list[int], n_prompt: int, **options: object) -> list[Row]:
    engine = Engine(tiny_model(11, shape=dataclasses.replace(TINY, n_layers=1)), SMALL, method=method, **options)
    sequence = engine.add(text[:n_prompt], len(text) - n_prompt, force_tokens=text[n_prompt:])
    return Watch(engine).run()[sequence]


@pytest.mark.parametrize("method", SPARSE_METHODS)
def test_case_11_offload_on_and_off(method: str) -> None:
    """A 3,000-token prompt: the same selections at every step, and logits equal to rounding; slots k and 4k."""
    text = random_tokens(3040, 11)
    resident = run(method, text, 3000, offload=False, poison=NAN)
    for slots in (5, 20):
        offloaded = run(method, text, 3000, slots=slots, poison=NAN)
        for mine, other in zip(resident, offloaded, strict=True):
            assert mine.selected == other.selected
            np.testing.assert_allclose(mine.logits, other.logits, rtol=0, atol=1e-12)
    loaded = sum(m for row in offloaded[1:] for layer in row.misses for m in layer)
    assert (loaded > 0) == (method != "dma")
    assert not any(m for row in resident for layer in row.misses for m in layer)


@pytest.mark.parametrize(("saving", "resuming"), [(False, True), (True, False), (False, False)])
def test_a_saved_sequence_goes_on_in_either_place(saving: bool, resuming: bool) -> None:
    """Saved with 0, 1 and 15 rows in its last block."""
    model, prompt = tiny_model(32), random_tokens(90, 32)
    whole = Engine(model, SMALL)
    whole_id = whole.add(prompt, 40)
    expected = whole.run()[whole_id]
    first = Engine(model, SMALL, offload=saving, poison=NAN)
    sequence = first.add(prompt, 40)
    for n_steps in (7, 1, 14):
        for _ in range(n_steps):
            first.step()
        second = Engine(model, SMALL, offload=resuming, poison=NAN)
        second.add(random_tokens(20, 4), 60)
        resumed = second.resume(first.save(sequence))
        assert second.run()[resumed] == expected


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
@pytest.mark.parametrize(("method", "offload"), [("nosa", True), ("nosa", False), ("infllmv2", True), ("full", False)])
def test_prefill_that_keeps_its_context_equals_oracle(method: str, offload: bool, chunk: int) -> None:
    model, tokens = tiny_model(6), random_tokens(180, 2)
    output = prefill_logits(
        model, tokens, SMALL, method=method, first=95, chunk=chunk, poison=NAN, offload=offload, keep_context=True
    )
    oracle = run_oracle(model, SMALL, method, tokens)
    assert output.logits.numpy() == pytest.approx(oracle.logits[95:], rel=0, abs=1e-9)
    for layer, ids in enumerate(output.block_ids):
        for at, heads in enumerate(ids.tolist()):
            assert [[j for j in head if j >= 0] for head in heads] == oracle.selected[95 + at][layer]


def prefill(offload: bool, keep: bool, chunk: int) -> tuple[Memory, list[int], PrefillCost]:
    model, tokens = tiny_model(7), random_tokens(150, 7)
    memory = Memory(model, SMALL, get_method("nosa"), n_slots=5, offload=offload, poison=NAN)
    memory.ensure(1, 200)
    memory.clear_lane(0, [])
    pages = memory.pool.allocate(memory.pages_for(150))
    memory.add_pages(0, 0, pages)
    cost = PrefillRunner(model, memory, chunk, keep_context=keep).run(tokens, 0, pages, PrefillOutput(149))
    return memory, pages, cost


@pytest.mark.parametrize("offload", [True, False])
def test_a_kept_context_reads_nothing_back_and_stores_the_same(offload: bool) -> None:
    """Chunks of 40 over 150 tokens: 0, 2, 5 and 7 whole 16-token blocks are read back, or none."""
    reread, pages, cost = prefill(offload, False, 40)
    kept, _, kept_cost = prefill(offload, True, 40)
    block_bytes = 2 * 2 * 16 * 8 * 8
    assert cost.h2d_bytes == [(2 + 5 + 7) * block_bytes * offload] * 2
    assert kept_cost.h2d_bytes == [0, 0]
    assert cost.d2h_bytes == kept_cost.d2h_bytes == [9 * block_bytes * offload] * 2
    assert all(us > 0 for us in cost.time_us + kept_cost.time_us)
    one, other = reread.save(0, pages, 150), kept.save(0, pages, 150)
    for name in ("blocks", "partial", "betas", "key_means", "beta_means"):
        for mine, theirs in zip(getattr(one, name), getattr(other, name), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["nosa", "full"])
def test_a_prefill_that_stores_nothing_gives_the_same(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    model, tokens = tiny_model(6), random_tokens(180, 2)
    expected = prefill_logits(model, tokens, SMALL, method=method, first=95, chunk=50)
    monkeypatch.setattr(Memory, "store_chunk", None)
    output = PrefillOutput(95)
    cost = prefill_only(model, tokens, SMALL, output, method=method, chunk=50)
    assert torch.equal(output.logits, expected.logits)
    assert len(output.block_ids) == len(expected.block_ids) == (0 if method == "full" else 2)
    assert all(torch.equal(a, b) for a, b in zip(output.block_ids, expected.block_ids, strict=True))
    assert cost.h2d_bytes == cost.d2h_bytes == [0, 0]


@pytest.mark.parametrize("bad_layer", [0, 1])
def test_reports_of_a_gpu_name_layer_position_head_and_block(monkeypatch: pytest.MonkeyPatch, bad_layer: int) -> None:
    """As the kernels report: int32 [last queries, kv_head], -1 where all is well; a chunk's are seen after the next."""
    calls, plain = [], prefill_module.queue_selection

    def reporting(q: torch.Tensor, *rest: object) -> tuple:
        reports = torch.full((3, 2), -1, dtype=torch.int32)
        if len(calls) == 2 + bad_layer:  # of the second chunk, positions 40 .. 79
            reports[1, 1] = 4
        calls.append(len(q))
        return plain(q, *rest)[0], reports

    monkeypatch.setattr(prefill_module, "queue_selection", reporting)
    place = (
        rf"layer {bad_layer}, prefill, row = position: NaN in the pooled stage-1 score of row 78, KV head 1, block 4"
    )
    with pytest.raises(NumericsError, match=place):
        prefill(True, True, 40)
    assert calls == [40] * 6


@given(pages=st.lists(st.integers(0, 12), unique=True, max_size=12))
def test_runs_of_pages_cover_them_in_order_and_are_as_long_as_can_be(pages: list[int]) -> None:
    runs = list(consecutive_runs(pages))
    assert [page + i for page, _, n in runs for i in range(n)] == pages
    assert [start for _, start, _ in runs] == [sum(n for *_, n in runs[:i]) for i in range(len(runs))]
    assert all(a + n != b for (a, _, n), (b, *_) in pairwise(runs))
