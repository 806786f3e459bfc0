"""Round trips, refusals, truncation at every byte, hostile parts (arrays are compared with the rows put in)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nosa_sys.errors import TraceError
from nosa_sys.model_shape import ModelShape
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.reader import Trace, read_part
from nosa_sys.traces.schema import SCHEMAS, TraceMeta
from nosa_sys.traces.writer import FlatLists, TraceWriter
from tests.traces.synthetic import make_trace


def meta() -> TraceMeta:
    return TraceMeta(model=ModelShape.preset("smollm2-135m"), sparse=SparseConfig(), slots=64)


def columns_of(rows: list[dict]) -> dict[str, list]:
    return {name: [row[name] for row in rows] for name in rows[0]}


@pytest.mark.parametrize("rows_per_part", [1, 3, 10, 10**6])
def test_round_trip_through_writer(tmp_path: Path, rows_per_part: int) -> None:
    source = make_trace(seed=1)
    with TraceWriter(tmp_path / "t", TraceMeta.from_dict(source.meta), rows_per_part=rows_per_part) as writer:
        for name, rows in source.tables.items():
            for begin in range(0, len(rows), 4):
                writer.add(name, columns_of(rows[begin : begin + 4]))
        writer.close(n_steps=source.meta["n_steps"])
    trace = Trace.open(tmp_path / "t")
    assert trace.meta.complete
    for name, rows in source.tables.items():
        assert trace.table(name).to_pylist() == rows
        assert trace.table(name).schema.equals(SCHEMAS[name])
    assert not list(tmp_path.rglob("*.partial"))


def test_flat_lists_equal_lists_of_arrays_and_are_copied(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    counts = rng.integers(0, 7, 40)
    for number, sizes in enumerate((counts, np.full(40, 6))):
        padded = rng.random((40, 6), dtype=np.float32)
        expected = [row[:size].tolist() for row, size in zip(padded, sizes, strict=True)]
        keys = {name: np.arange(40) for name in ("step", "sequence", "layer", "kv_head")}
        with TraceWriter(tmp_path / str(number), meta()) as writer:
            writer.add("scores", {**keys, "window_scores": FlatLists.from_padded(padded, sizes)})
            padded[:] = -1
        assert Trace.open(tmp_path / str(number)).table("scores")["window_scores"].to_pylist() == expected


@pytest.mark.parametrize("offsets", [[0, 2, 5], [1, 2, 4], [0, 3, 2, 4]])
def test_flat_lists_with_wrong_offsets_are_refused(tmp_path: Path, offsets: list[int]) -> None:
    n_rows = len(offsets) - 1
    columns: dict = {name: np.zeros(n_rows, dtype=np.int64) for name in ("step", "sequence", "layer", "kv_head")}
    with pytest.raises(TraceError, match=r"window_scores.*offsets must ascend from 0 to the 4 values"):
        TraceWriter(tmp_path, meta()).add(
            "scores", columns | {"window_scores": FlatLists(np.zeros(4), np.array(offsets))}
        )
    lists = FlatLists(np.zeros(4), np.array([0, 2, 4]))
    columns = {name: np.zeros(2, dtype=np.int64) for name in columns} | {"window_scores": lists}
    with pytest.raises(TraceError, match=r"'sequence'.*not lists"):
        TraceWriter(tmp_path / "other", meta()).add("scores", columns | {"sequence": lists})


def test_an_abandoned_trace_keeps_its_rows_and_stays_incomplete(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, meta())
    writer.add("betas", {**{n: [1] for n in ("sequence", "layer", "kv_head", "window")}, "beta_mean": [0.5]})
    writer.abandon()
    assert pq.read_table(tmp_path / "betas").num_rows == 1
    assert not TraceMeta.load(tmp_path).complete
    with pytest.raises(TraceError, match="is closed"):
        writer.add("betas", {})
    writer.abandon()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("end", ["close", "abandon"])
def test_what_a_full_disk_refused_is_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, background: bool
) -> None:
    """The second part fails once; with a thread, the flush behind it hears of it."""
    replace, calls = os.replace, []

    def full(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        replace(source, target)

    writer = TraceWriter(tmp_path, meta(), background=background)
    monkeypatch.setattr("nosa_sys.traces.writer.os.replace", full)
    row = {n: [1] for n in ("sequence", "layer", "kv_head")} | {"beta_mean": [0.5]}

    def fill() -> None:
        for window in range(50):
            writer.add("betas", row | {"window": [window]})
            writer.flush()
            time.sleep(1e-3)

    with pytest.raises(TraceError, match="No space left"):
        fill()
    getattr(writer, end)()
    found = pq.read_table(tmp_path / "betas")["window"].to_pylist()
    assert found == list(range(len(found)))
    assert len(found) >= 2
    assert background or len(found) == 2
    assert TraceMeta.load(tmp_path).complete == (end == "close")


@pytest.mark.parametrize("status", ["measured", "injected", "injected: 2 misses a head"])
def test_a_status_may_carry_a_label(tmp_path: Path, status: str) -> None:
    data = meta().to_dict() | {"status": status}
    read = TraceMeta.from_dict(data)
    assert (read.status, read.injected) == (status, status.startswith("injected"))
    for wrong in ("2 misses", "injectedly", "Injected: x", None):
        with pytest.raises(TraceError, match=r"status=.*alone or before"):
            TraceMeta.from_dict(data | {"status": wrong})


def test_selection_rows_match_the_table(tmp_path: Path) -> None:
    source = make_trace()
    rows = Trace.open(source.write(tmp_path / "t", rows_per_part=5)).selections
    expected = source.tables["selections"]
    assert rows.position.tolist() == [r["position"] for r in expected]
    assert rows.cold.tolist() == [r["cold"] for r in expected]
    assert np.isnan(rows.gamma).tolist() == [r["gamma"] is None for r in expected]
    picked = rows.take(np.array([3, 0, 7]))
    lists = np.split(picked.block_ids, picked.offsets[1:-1])
    assert [part.tolist() for part in lists] == [expected[i]["block_ids"] for i in (3, 0, 7)]


def test_empty_trace_has_its_required_tables(tmp_path: Path) -> None:
    TraceWriter(tmp_path, meta()).close()
    trace = Trace.open(tmp_path)
    assert len(trace.selections) == 0
    assert trace.meta.n_steps == 0
    assert not trace.has("scores")


def test_existing_trace_is_kept_unless_overwritten(tmp_path: Path) -> None:
    source = make_trace()
    source.write(tmp_path / "t")
    (tmp_path / "t" / "notes.txt").write_text("mine")
    with pytest.raises(TraceError, match="already holds a trace"):
        TraceWriter(tmp_path / "t", meta())
    assert len(Trace.open(tmp_path / "t").selections)
    TraceWriter(tmp_path / "t", meta(), overwrite=True).close()
    assert len(Trace.open(tmp_path / "t").selections) == 0
    assert (tmp_path / "t" / "notes.txt").read_text() == "mine"


def test_exception_leaves_the_trace_incomplete(tmp_path: Path) -> None:
    def killed() -> None:
        with TraceWriter(tmp_path / "t", meta()) as writer:
            writer.add("prefill", {"sequence": [0], "layer": [0], "n_tokens": [1], "h2d_bytes": [0], "d2h_bytes": [0]})
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        killed()
    with pytest.raises(TraceError, match="incomplete"):
        Trace.open(tmp_path / "t")
    assert Trace.open(tmp_path / "t", allow_incomplete=True).table("prefill").num_rows == 1


STEP_ROW = {
    "step": [0],
    "layer": [-1],
    "n_sequences": [1],
    "n_misses": [0],
    "h2d_bytes": [0],
    "d2h_bytes": [0],
    "prefetch_bytes": [0],
    "wasted_prefetch_bytes": [0],
}


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        ("nonsense", {}, "unknown trace table"),
        ("steps", {"colour": [1]}, "unknown column 'colour'"),
        ("steps", {"step": [0, 1]}, "'layer' has 1 rows"),
        ("steps", {"step": [2**31]}, "outside"),
        ("steps", {"layer": [-(2**15) - 1]}, "outside"),
        ("steps", {"n_misses": [1.0]}, "whole numbers"),
        ("steps", {"n_misses": [None]}, "whole numbers"),
        ("steps", {"n_misses": [True]}, "whole numbers"),
        ("steps", {"time_us": ["fast"]}, "numbers"),
    ],
)
def test_writer_refuses_bad_rows(tmp_path: Path, table: str, change: dict, message: str) -> None:
    writer = TraceWriter(tmp_path, meta())
    with pytest.raises(TraceError, match=message):
        writer.add(table, {**STEP_ROW, **change})
    writer.close()
    assert Trace.open(tmp_path).table("steps").num_rows == 0


def test_writer_names_a_missing_column(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="'layer' is missing"):
        TraceWriter(tmp_path, meta()).add("steps", {"step": [1]})


def test_case_31_ids_and_bytes_stay_integers(tmp_path: Path) -> None:
    """case 31: values above 2^53 keep every bit, times may be null, integer columns may not."""
    huge = 2**62 + 1
    with TraceWriter(tmp_path / "t", meta()) as writer:
        writer.add("steps", {**STEP_ROW, "h2d_bytes": [huge], "time_us": [None]})
    table = Trace.open(tmp_path / "t").table("steps")
    assert table.column("h2d_bytes").to_pylist() == [huge]
    assert table.column("h2d_bytes").type == pa.int64()
    assert table.column("time_us").to_pylist() == [None]


def foreign_part(directory: Path, table: pa.Table) -> Trace:
    source = make_trace()
    source.write(directory)
    pq.write_table(table, directory / "steps" / "part-00000.parquet")
    return Trace.open(directory)


def steps_table(**replaced: pa.Array) -> pa.Table:
    table = pa.Table.from_pylist(make_trace().tables["steps"], schema=SCHEMAS["steps"])
    for name, array in replaced.items():
        table = table.set_column(table.schema.get_field_index(name), name, array)
    return table


def test_case_31_null_in_an_integer_column_is_named(tmp_path: Path) -> None:
    """case 31: a null id is refused, whether it stayed null or turned the column into floats."""
    n_rows = steps_table().num_rows
    nulls = pa.array([None] + [0] * (n_rows - 1), type=pa.int32())
    with pytest.raises(TraceError, match=r"'n_sequences' holds 1 nulls"):
        foreign_part(tmp_path / "a", steps_table(n_sequences=nulls)).table("steps")
    floats = pa.array([None] + [0.0] * (n_rows - 1), type=pa.float64())
    with pytest.raises(TraceError, match=r"'n_misses' has type double.*float column"):
        foreign_part(tmp_path / "b", steps_table(n_misses=floats)).table("steps")


def test_case_31_other_schema_versions_say_what_to_do(tmp_path: Path) -> None:
    """case 31: an old or a newer schema is refused with a hint."""
    for version, message in ((0, "capture the trace again"), (2, "upgrade nosa-sys")):
        source = make_trace()
        source.meta["schema_version"] = version
        with pytest.raises(TraceError, match=message):
            Trace.open(source.write(tmp_path / str(version)))


def test_missing_or_doubled_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"part-00000.*'h2d_us' is missing"):
        foreign_part(tmp_path / "a", steps_table().drop_columns(["h2d_us"])).table("steps")
    table = steps_table()
    doubled = table.append_column(pa.field("step", pa.int32()), table.column("step"))
    with pytest.raises(TraceError, match="'step' is there twice"):
        foreign_part(tmp_path / "b", doubled).table("steps")


def test_foreign_names_of_list_elements_are_accepted(tmp_path: Path) -> None:
    source = make_trace()
    source.write(tmp_path)
    kind = pa.list_(pa.field("element", pa.int32(), nullable=False))
    table = pa.Table.from_pylist(source.tables["selections"], schema=SCHEMAS["selections"])
    index = table.schema.get_field_index("block_ids")
    column = pa.array([r["block_ids"] for r in source.tables["selections"]], type=kind)
    pq.write_table(table.set_column(index, "block_ids", column), tmp_path / "selections" / "part-00000.parquet")
    assert Trace.open(tmp_path).table("selections").to_pylist() == source.tables["selections"]


def test_null_inside_a_list_is_named(tmp_path: Path) -> None:
    source = make_trace()
    source.write(tmp_path)
    source.tables["selections"][2]["block_ids"][0] = None
    table = pa.Table.from_pylist(source.tables["selections"], schema=SCHEMAS["selections"])
    pq.write_table(table, tmp_path / "selections" / "part-00000.parquet")
    with pytest.raises(TraceError, match=r"lists of column 'block_ids' hold 1 nulls"):
        _ = Trace.open(tmp_path).selections


def test_gap_in_the_parts_is_named(tmp_path: Path) -> None:
    make_trace().write(tmp_path, rows_per_part=3)
    (tmp_path / "selections" / "part-00001.parquet").unlink()
    with pytest.raises(TraceError, match="part 1 is missing although part 2 is there"):
        Trace.open(tmp_path).table("selections")


def test_missing_table_and_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such directory"):
        Trace.open(tmp_path / "nowhere")
    with pytest.raises(TraceError, match=r"meta\.json is missing"):
        Trace.open(tmp_path)
    make_trace().write(tmp_path)
    shutil.rmtree(tmp_path / "steps")
    with pytest.raises(TraceError, match="'steps' is missing"):
        Trace.open(tmp_path)


def test_parquet_cut_at_every_byte_is_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, meta()) as writer:
        writer.add("betas", {"sequence": [0], "layer": [0], "kv_head": [0], "window": [0], "beta_mean": [0.5]})
    path = tmp_path / "betas" / "part-00000.parquet"
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(TraceError, match=r"part-00000\.parquet"):
            read_part("betas", path)
    path.write_bytes(whole)
    assert Trace.open(tmp_path).table("betas").num_rows == 1


def test_meta_cut_at_every_byte_is_refused(tmp_path: Path) -> None:
    TraceWriter(tmp_path, meta()).close()
    path = tmp_path / "meta.json"
    whole = path.read_bytes()
    last_brace = whole.rindex(b"}")
    for size in range(last_brace + 1):
        path.write_bytes(whole[:size])
        with pytest.raises(TraceError, match=r"meta\.json"):
            Trace.open(tmp_path)


@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_flipped_bytes_never_crash_nor_pass_unseen(tmp_path_factory: pytest.TempPathFactory, place: float, flip: int):
    """A flipped byte is refused (page checksums) or touched nothing that a reader uses."""
    directory = tmp_path_factory.mktemp("flip")
    with TraceWriter(directory, meta()) as writer:
        writer.add("steps", {name: values * 50 for name, values in STEP_ROW.items()})
    path = directory / "steps" / "part-00000.parquet"
    expected = Trace.open(directory).table("steps").to_pylist()
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= flip
    path.write_bytes(data)
    try:
        found = Trace.open(directory).table("steps").to_pylist()
    except TraceError:
        return
    assert len(found) == 50
    assert [r["step"] for r in found] == [r["step"] for r in expected]


def test_giant_list_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    """A few kilobytes of parquet may claim 10^9 list values; the footer's counts are judged first."""
    source = make_trace()
    source.write(tmp_path)
    rows = source.tables["selections"][:1]
    schema = SCHEMAS["selections"]
    table = pa.Table.from_pylist(rows, schema=schema)
    n_values = 2 * 10**7
    zeros = pa.ListArray.from_arrays(pa.array([0, n_values], pa.int32()), pa.array(np.zeros(n_values, np.int32)))
    table = table.set_column(schema.get_field_index("block_ids"), "block_ids", zeros)
    path = tmp_path / "selections" / "part-00000.parquet"
    pq.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 10**5
    with pytest.raises(TraceError, match=r"decode to \d+ bytes"):
        read_part("selections", path, max_bytes=n_values * 4 - 1)


def test_reading_traces_loads_no_torch() -> None:
    code = (
        "import sys, nosa_sys.traces.check, nosa_sys.traces.replay, nosa_sys.traces.statistics, "
        "nosa_sys.traces.writer, nosa_sys.traces.recover, nosa_sys.traces.timeline; "
        "print([m for m in ('torch', 'simpy', 'plotly') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_meta_written_by_the_writer_is_strict_json(tmp_path: Path) -> None:
    TraceWriter(tmp_path, meta()).close(seed=7)
    data = json.loads((tmp_path / "meta.json").read_text())
    assert data["complete"] is True
    assert data["seed"] == 7
    with pytest.raises(TraceError):
        TraceWriter(tmp_path / "other", meta()).close(colour="red")
