"""Random engine operations (add, step, cancel, save, resume) in random settings, held against the oracle."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nosa_sys.engine.engine import Engine
from nosa_sys.sparse_config import SparseConfig
from tests.engine.checks import assert_misses_match, assert_rows_match
from tests.engine.helpers import METHODS, NAN, Watch, random_tokens, tiny_model
from tests.engine.oracle import run_oracle

# 8-token blocks: 20 tokens exceed the budget, and a window spans two blocks
FINE = SparseConfig(
    block_size=8, kernel_size=16, kernel_stride=8, topk=5, init_blocks=1, window_size=8, select_blocks=2
)

OPERATION = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 70), st.integers(1, 25)),
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("resume"), st.integers(0, 20)),
)


@settings(max_examples=40)
@given(
    operations=st.lists(OPERATION, min_size=2, max_size=8),
    method=st.sampled_from(METHODS),
    hot=st.sampled_from([(None, None), (5, "exact"), (6, "lru"), (8, "beta"), (11, "lru")]),
    chunk=st.integers(1, 40),
    max_batch=st.integers(1, 4),
    offload=st.booleans(),
    runner=st.sampled_from(["eager", "serial", "split_merge", "two_batch", "auto"]),
)
def test_every_sequence_equals_its_oracle(
    operations: list[tuple],
    method: str,
    hot: tuple[int | None, str | None],
    chunk: int,
    max_batch: int,
    offload: bool,
    runner: str,
) -> None:
    """``runner``: the eager engine, or the fused step under the schedule of that name."""
    model = tiny_model(9)
    offload = offload and method != "full"
    slots, policy = hot if offload else (None, None)
    engine = Engine(
        model,
        FINE,
        method=method,
        offload=offload,
        slots=slots,
        policy=policy,
        prefill_chunk=chunk,
        max_batch=max_batch,
        poison=NAN,
        **({} if runner == "eager" else {"runner": "kernels", "schedule": runner, "inspect": True}),
    )
    watch = Watch(engine)
    texts: dict[int, list[int]] = {}  # the tokens that each sequence must run through, forced where it generates

    def live(pick: int) -> int | None:
        alive = [s.id for s in (*engine._running, *engine._waiting)]
        return alive[pick % len(alive)] if alive else None

    for seed, (kind, *values) in enumerate(operations):
        if kind == "add":
            prompt, new = values
            text = random_tokens(prompt + new, seed)
            texts[engine.add(text[:prompt], new, force_tokens=text[prompt:])] = text
        elif kind == "step":
            for _ in range(values[0]):
                watch.step()
        elif (sequence := live(values[0])) is not None:
            if kind == "resume":  # a saved copy goes on beside the original, or in its place
                texts[engine.resume(engine.save(sequence))] = texts[sequence]
            if kind == "cancel" or values[0] % 2:
                engine.cancel(sequence)
    watch.run()
    assert engine.memory.pool.pages_in_use == 0
    total = 0
    for sequence, rows in watch.rows.items():
        oracle = run_oracle(model, FINE, method, texts[sequence])
        assert_rows_match(rows, oracle)
        total += assert_misses_match(rows, oracle, engine)
        assert engine.outputs[sequence] == texts[sequence][len(texts[sequence]) - len(engine.outputs[sequence]) :] or (
            rows[-1].position < len(texts[sequence]) - 2
        )
    assert engine.summary()["blocks_loaded"] == total
