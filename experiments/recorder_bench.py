"""What a background recorder costs the thread that launches decode steps, on a CPU alone, with the device simulated.

A step of the simulated device lasts ``period_ms`` and begins when the step before has ended and its launch is done. As
in the engine, step i + 2 is launched once step i has ended: host work shorter than a period costs nothing. The host's
work is what the engine does for a recorder (batch, results copied out of the ring) and ``host_ms`` of other work: short
bits of Python between which the GIL is let go, as launches do. ``lateness`` is the time from a step's end to the launch
behind it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nosa_sys.engine.injection import geometric_origins
from nosa_sys.engine.plan import StepPlan, make_batch
from nosa_sys.engine.recorder import Recorder
from nosa_sys.experiments.recorder_bench_gil import GIL_SOURCE
from nosa_sys.machine import git_revision, versions
from nosa_sys.methods import get_method
from nosa_sys.model_shape import ModelShape
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.schema import SequenceInfo, TraceMeta

_PRELOADED = "NOSA_RECORDER_BENCH_GIL"
_RING = 3  # results that the engine keeps on the host
_BIT_US = 50.0  # of Python between two places where the GIL is let go
_N_SOURCES = 16  # different selections, used in turns


@dataclass(frozen=True)
class Load:
    """A run to be recorded: the defaults are 64 sequences at 16K of a model of 32 layers and 2 KV heads."""

    batch: int = 64
    context: int = 16384
    n_layers: int = 32
    n_heads: int = 2
    changed: int = 2  # blocks of a selection that differ from the step before
    steps: int = 96
    period_ms: float = 15.2
    host_ms: float = 4.0
    injected: bool = False  # origins are then worked out on the host


def selections(load: Load, sparse: SparseConfig, seed: int) -> list[NDArray[np.int32]]:
    """Ascending ids [layer, batch, kv_head, k], each set differing from the one before in ``changed`` blocks."""
    rng = np.random.default_rng(seed)
    n_blocks = load.context // sparse.block_size
    shape = (load.n_layers, load.batch, load.n_heads)
    order = np.argsort(rng.random((*shape, n_blocks)), axis=-1).astype(np.int32)
    found = []
    for turn in range(_N_SOURCES):
        away = (sparse.topk + turn * load.changed + np.arange(load.changed)) % n_blocks
        here = np.arange(load.changed) + turn * load.changed % (sparse.topk - load.changed)
        order[..., np.concatenate([here, away])] = order[..., np.concatenate([away, here])]
        found.append(np.sort(order[..., : sparse.topk], axis=-1))
    return found


class SimulatedEngine:
    """The host's side of decode steps: waits for the simulated device, gathers results, launches, records."""

    def __init__(self, load: Load, recorder: Recorder | None, ids: list[NDArray[np.int32]], sparse: SparseConfig):
        self._load, self._recorder, self._ids, self._sparse = load, recorder, ids, sparse
        self._lanes = np.arange(load.batch)
        self._released = np.empty(4096, dtype=np.int8)  # numpy lets the GIL go for so many
        self._misses = np.full((load.n_layers, load.batch, load.n_heads), load.changed, dtype=np.int32)
        self._origins = geometric_origins(ids[0], [load.context // sparse.block_size] * load.batch, sparse)
        self._ring = [np.empty_like(ids[0]) for _ in range(_RING)]
        if recorder is not None:
            shape = ModelShape("bench", load.n_layers, 16 * load.n_heads, load.n_heads, 128, 4096, 14336, 128256)
            recorder.start(TraceMeta(model=shape, sparse=sparse, slots=sparse.topk), dense=False)
            for sequence in range(load.batch):
                recorder.on_start_sequence(SequenceInfo(sequence, load.context), None, None)

    def host_work(self, step: int) -> None:
        """What the engine does between the end of a step and the launch of the next one but one."""
        load = self._load
        positions = [load.context - 1 + step] * load.batch
        lanes = list(range(load.batch))
        cold = [step == 0] * load.batch
        batch = make_batch(step, lanes, lanes, positions, cold, self._sparse, get_method("nosa"), offload=True)
        if self._recorder is not None:
            block_ids = self._ring[step % _RING][:, self._lanes]
            if load.injected:
                origins = geometric_origins(block_ids, batch.blocks, self._sparse)
            else:
                origins = self._origins[:, self._lanes]
            plan = StepPlan(
                batch=batch,
                n_misses=self._misses[:, self._lanes],
                time_us=load.period_ms * 1e3,
                block_ids=block_ids,
                origins=origins,
                counts=np.full(load.batch, self._sparse.topk, dtype=np.int32),
            )
            self._recorder.on_step(plan)
        self._other_work()

    def _other_work(self) -> None:
        """``host_ms`` of this thread's processor time, so that waits for the GIL or a core make the step later."""
        over_s = time.thread_time() + self._load.host_ms * 1e-3
        while (left_s := over_s - time.thread_time()) > 0:
            until_s = time.thread_time() + min(left_s, _BIT_US * 1e-6)
            while time.thread_time() < until_s:
                pass
            np.copyto(self._released, 0)

    def run(self) -> dict[str, NDArray[np.float64]]:
        """Seconds of each step: its end on the device, and how late the launch behind it was (``lateness_s``)."""
        period_s = self._load.period_ms * 1e-3
        launched = [time.perf_counter()] * 2
        ended, lateness = [launched[0]], []
        for step in range(self._load.steps):
            ended.append(max(ended[-1], launched[step]) + period_s)
            np.copyto(self._ring[step % _RING], self._ids[step % _N_SOURCES])  # by the copy engine, in truth
            while (left_s := ended[-1] - time.perf_counter()) > 0:
                time.sleep(max(left_s - 2e-4, 0.0))
            self.host_work(step)
            launched.append(time.perf_counter())
            lateness.append(launched[-1] - ended[-1])
        return {"ended_s": np.array(ended), "lateness_s": np.array(lateness)}


def one_run(load: Load, directory: Path, *, record: bool, seed: int, gil: Callable[[], dict[str, float]]) -> dict:
    """Figures of one run, with the recorder or without."""
    sparse = SparseConfig()
    ids = selections(load, sparse, seed)
    opened_s = time.perf_counter()
    recorder = Recorder(directory, background=True) if record else None
    engine = SimulatedEngine(load, recorder, ids, sparse)
    opened_s = time.perf_counter() - opened_s
    time.sleep(0.2)
    rss, held, cpu_s, own_s = _rss_mib(), gil(), time.process_time(), time.thread_time()
    found = engine.run()
    cpu_s, own_s = time.process_time() - cpu_s, time.thread_time() - own_s
    held = {name: value - held[name] for name, value in gil().items()}
    row: dict[str, Any] = {"recorder": "on" if record else "off", "open_ms": opened_s * 1e3}
    took_s = found["ended_s"][-1] - found["ended_s"][0]
    late_ms = found["lateness_s"] * 1e3
    row |= {
        "tokens_per_s": load.batch * load.steps / took_s,
        "device_idle_share": 1 - load.steps * load.period_ms * 1e-3 / took_s,
        "lateness_ms_mean": late_ms.mean(),
        "lateness_ms_p50": np.median(late_ms),
        "lateness_ms_p99": np.quantile(late_ms, 0.99),
        "lateness_ms_max": late_ms.max(),
        "steps_late": int((late_ms > load.period_ms).sum()),
        "main_cpu_ms_per_step": own_s * 1e3 / load.steps,
        "other_cpu_ms_per_step": (cpu_s - own_s) * 1e3 / load.steps,
        "rss_grown_mib": _rss_mib() - rss,
    }
    row |= {f"{name}_per_step": value / load.steps for name, value in held.items()}
    if recorder is not None:
        close_s = time.perf_counter()
        recorder.close()
        row["close_ms"] = (time.perf_counter() - close_s) * 1e3
        row["trace_mib"] = sum(p.stat().st_size for p in directory.rglob("*") if p.is_file()) / 2**20
        row["lateness_ms"] = [round(value, 3) for value in late_ms.tolist()]
    return row


def _rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _gil_counter() -> Callable[[], dict[str, float]]:
    """How long threads other than the main one held the GIL, in processor time; nothing without the shim."""
    path = os.environ.get(_PRELOADED)
    if path is None:
        return dict
    shim = ctypes.CDLL(path)
    shim.gil_held_ns.restype = shim.gil_main_waited_ns.restype = ctypes.c_longlong
    return lambda: {"gil_held_ms": shim.gil_held_ns() / 1e6, "main_gil_wait_ms": shim.gil_main_waited_ns() / 1e6}


def _with_shim(arguments: list[str]) -> int:
    """Run again with the functions that take and release the GIL counted (needs a C compiler and libpython)."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "gil.so"
        compile_it = ["cc", "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
        subprocess.run(compile_it, input=GIL_SOURCE, text=True, check=True)
        environment = os.environ | {"LD_PRELOAD": str(library), _PRELOADED: str(library)}
        return subprocess.run(
            [sys.executable, "-m", __spec__.name, *arguments], env=environment, check=False
        ).returncode


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="cost of a background recorder, with a simulated device")
    parser.add_argument("--out", type=Path, required=True, help="file of the rows, JSON")
    parser.add_argument("--label", default="", help="what is measured, kept with the rows")
    parser.add_argument("--runs", type=int, default=3, help="of each kind, in turns")
    parser.add_argument("--steps", type=int, default=Load.steps)
    parser.add_argument("--period-ms", type=float, default=Load.period_ms)
    parser.add_argument("--host-ms", type=float, default=Load.host_ms)
    parser.add_argument("--injected", action="store_true", help="origins are worked out on the host")
    parser.add_argument("--gil", action="store_true", help="count time under the GIL too (needs cc)")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    if options.gil and _PRELOADED not in os.environ:
        return _with_shim(given)
    load = Load(steps=options.steps, period_ms=options.period_ms, host_ms=options.host_ms, injected=options.injected)
    gil, rows = _gil_counter(), []
    for turn in range(options.runs):
        for record in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                begun = os.getloadavg()[0]
                row = one_run(load, Path(folder) / "trace", record=record, seed=turn, gil=gil)
            rows.append({"run": turn, "load_average": begun, **row})
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "lateness_ms"}), flush=True)
    document: dict[str, Any] = {
        "status": "measured",
        "label": options.label,
        "git_revision": git_revision(),
        "versions": versions(),
        "n_cores": os.cpu_count(),
        "load": vars(load),
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
