"""The recorder's own thread: order, borrowed arrays, backpressure, and errors that are never lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from nosa_sys.engine.recorder import Recorder
from nosa_sys.errors import TraceError
from nosa_sys.traces.perfetto import read_timeline_file
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.schema import TraceMeta
from nosa_sys.traces.writer import TraceWriter
from nosa_sys.work_thread import WorkThread
from tests.engine.random_plans import play, random_traffic

TABLES = ("selections", "steps", "scores", "betas")


def tables(directory: Path) -> dict[str, list[dict]]:
    return {name: Trace.open(directory).table(name).to_pylist() for name in TABLES}


def test_arrays_may_be_used_again_once_they_are_consumed(tmp_path: Path) -> None:
    """A ring of one: every array is scribbled over as soon as the counter allows it."""
    with Recorder(tmp_path / "plain") as recorder:
        list(play(random_traffic(7, 30, scores=True), recorder))
    with Recorder(tmp_path / "ring", background=True) as recorder:
        for n_steps, plan in enumerate(play(random_traffic(7, 30, scores=True), recorder), start=1):
            recorder.wait_consumed(n_steps)
            assert recorder.consumed_steps == n_steps
            for array in (plan.block_ids, plan.origins, plan.counts, plan.n_misses, plan.window_scores):
                array[...] = 99
    assert tables(tmp_path / "ring") == tables(tmp_path / "plain")


def failing_writer(monkeypatch: pytest.MonkeyPatch, at_step: int) -> None:
    add = TraceWriter.add

    def broken(self: TraceWriter, table: str, columns: dict) -> None:
        if table == "steps" and at_step in columns["step"]:
            raise TraceError("no space left")
        add(self, table, columns)

    monkeypatch.setattr(TraceWriter, "add", broken)


def test_an_error_comes_back_at_the_next_call_and_at_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_writer(monkeypatch, at_step=3)
    recorder = Recorder(tmp_path / "t", background=True)
    n_steps = 0

    def run() -> None:
        nonlocal n_steps
        for _ in play(random_traffic(1, 30), recorder):
            n_steps += 1
            recorder.wait_consumed(n_steps)

    with pytest.raises(TraceError, match="no space left"):
        run()
    assert n_steps == 4, "the wait for the step that failed"
    for call in (lambda: recorder.on_leave(0), recorder.close, recorder.close, lambda: recorder.wait_consumed(1)):
        with pytest.raises(TraceError, match="no space left"):
            call()
    assert not TraceMeta.load(tmp_path / "t").complete
    assert Trace.recover(tmp_path / "t").meta.n_steps == 3, "what was whole is kept"


def test_an_error_of_the_last_step_comes_out_of_the_with_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_writer(monkeypatch, at_step=5)

    def run() -> None:
        with Recorder(tmp_path / "t", background=True) as recorder:
            list(play(random_traffic(1, 6), recorder))

    with pytest.raises(TraceError, match="no space left"):
        run()
    assert not TraceMeta.load(tmp_path / "t").complete


def test_an_error_beside_another_is_noted_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_writer(monkeypatch, at_step=5)

    def run() -> None:
        with Recorder(tmp_path / "t", background=True) as recorder:
            list(play(random_traffic(1, 6), recorder))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        run()
    assert "no space left" in caught.value.__notes__[0]


@pytest.mark.parametrize("background", [False, True])
def test_steps_that_wait_are_written_when_a_run_fails(tmp_path: Path, background: bool) -> None:
    """Seven steps: the last three are past the flush at four."""

    def run() -> None:
        with Recorder(tmp_path / "t", background=background) as recorder:
            list(play(random_traffic(3, 7), recorder))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert Trace.recover(tmp_path / "t").meta.n_steps == 7


def test_steps_converted_one_by_one_or_together_give_the_same_tables(tmp_path: Path) -> None:
    for name, rows_per_part in (("single", 1), ("few", 40), ("many", 65536)):
        with Recorder(tmp_path / name, rows_per_part=rows_per_part, background=True) as recorder:
            list(play(random_traffic(5, 30, scores=True), recorder))
    assert tables(tmp_path / "single") == tables(tmp_path / "few") == tables(tmp_path / "many")
    n_parts = {name: len(list((tmp_path / name / "steps").iterdir())) for name in ("single", "few", "many")}
    assert n_parts["single"] == 30 > n_parts["few"] > n_parts["many"] == 6  # steps 1, 2, 4, 8, 16 and the rest


def test_steps_beyond_the_bytes_that_may_wait_hold_the_caller_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that stands still: what is kept in memory stops growing, and goes on when the writer does."""
    gate, given = threading.Event(), []
    add = TraceWriter.add

    def slow(self: TraceWriter, table: str, columns: dict) -> None:
        gate.wait()
        add(self, table, columns)

    monkeypatch.setattr(TraceWriter, "add", slow)
    monkeypatch.setattr("nosa_sys.engine.recorder.MAX_PENDING_BYTES", 4000)
    monkeypatch.setattr("nosa_sys.engine.recorder._CHUNK_BYTES", 1000)
    traffic = random_traffic(2, 60)
    recorder = Recorder(tmp_path / "t", background=True)

    def size(n_steps: int) -> int:
        return sum(p.block_ids.nbytes for p in traffic.plans[:n_steps])

    caller = threading.Thread(target=lambda: [given.append(1) for _ in play(traffic, recorder)])
    caller.start()
    caller.join(timeout=0.3)
    assert caller.is_alive()
    assert 0 < size(len(given)) <= 4000 < size(60)
    gate.set()
    caller.join()
    recorder.close()
    assert Trace.open(tmp_path / "t").meta.n_steps == 60


def test_after_the_end_nothing_is_taken(tmp_path: Path) -> None:
    traffic = random_traffic(1, 5)
    recorder = Recorder(tmp_path / "t", background=True)
    list(play(traffic, recorder))
    recorder.close()
    recorder.close()
    with pytest.raises(TraceError, match="is closed"):
        recorder.on_step(traffic.plans[-1])


@pytest.mark.parametrize("background", [False, True])
def test_marks_become_a_timeline(tmp_path: Path, background: bool) -> None:
    with Recorder(tmp_path / "t", background=background) as recorder:
        plans = random_traffic(1, 3).plans
        for begin_us, plan in zip((None, None, 500.0), play(random_traffic(1, 3), recorder), strict=True):
            recorder.on_step(plan, [("gpu", "attention", 0, 1.0, 2.0, 0), ("h2d", "copy", 0, 1.0, 3.0, 64)], begin_us)
    events = read_timeline_file(tmp_path / "t" / "timeline.json.gz")
    begins = [e["ts"] for e in events if e["ph"] == "b" and e["name"] == "attention"]
    assert begins == pytest.approx([1.0, plans[0].time_us + 1.0, 501.0])
    hits = [e["args"]["hits"] for e in events if e["name"] == "hit rate"]
    selected = [sum((p.block_ids[layer] >= 0).sum() for layer in range(2)) for p in plans]
    assert hits == pytest.approx([1 - p.n_misses.sum() / n for p, n in zip(plans, selected, strict=True)])
    assert not (tmp_path / "t" / "timeline.json.gz.partial").exists()


# ---- the thread alone
def test_calls_run_in_order_and_no_more_wait_than_may() -> None:
    gate, done, most = threading.Event(), [], 0
    thread = WorkThread("test", max_pending=3)

    def call(number: int) -> Callable[[], None]:
        def work() -> None:
            gate.wait()
            done.append(number)

        return work

    def submit_all() -> None:
        nonlocal most
        for number in range(20):
            thread.submit(call(number))
            most = max(most, number + 1 - len(done))

    caller = threading.Thread(target=submit_all)
    caller.start()
    caller.join(timeout=0.2)
    assert caller.is_alive(), "the fourth call has to wait"
    assert most == 3
    gate.set()
    caller.join()
    thread.stop()
    assert done == list(range(20))
    assert most <= 4  # one more while a call that is done is not counted yet
    thread.stop()


def test_calls_may_have_sizes_and_one_alone_is_never_too_large() -> None:
    gate = threading.Event()
    thread = WorkThread("test", max_pending=10)
    thread.submit(gate.wait, size=99)
    caller = threading.Thread(target=lambda: thread.submit(lambda: None, size=1))
    caller.start()
    caller.join(timeout=0.1)
    assert caller.is_alive()
    gate.set()
    caller.join()
    thread.stop()


def test_after_an_error_calls_are_skipped_but_counted() -> None:
    ran, over = [], []
    thread = WorkThread("test", max_pending=2)
    gate = threading.Event()

    def fail() -> None:
        gate.wait()
        raise KeyError("broken")

    thread.submit(fail, lambda: over.append("fail"))
    thread.submit(lambda: ran.append("late"), lambda: over.append("late"))
    gate.set()
    thread.stop()
    assert (ran, over) == ([], ["fail", "late"])
    assert isinstance(thread.error, KeyError)
    with pytest.raises(KeyError, match="broken"):
        thread.submit(lambda: None)
