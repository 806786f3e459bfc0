"""The demo: capture a real document, check the theorem, replay, sweep, report. Everything lands in one directory."""

from __future__ import annotations

import json
import pydoc_data.topics
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from nosa_sys.engine.sampling import SamplingParams
from nosa_sys.errors import NosaError
from nosa_sys.experiments.capture import CaptureRequest, Progress, run_capture
from nosa_sys.experiments.checks import check_document
from nosa_sys.experiments.replays import ReplayRequest, replay_document
from nosa_sys.experiments.sweeps import run_sweep, shipped_recipe
from nosa_sys.outputs import check_output, whole_directory
from nosa_sys.report.inputs import load_inputs
from nosa_sys.report.page import build_page
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.reader import Trace
from nosa_sys.traces.schema import write_text_whole

DEMO_FILE = "demo.json"
PROMPT_TOKENS = 4200
SPARSE = SparseConfig(topk=16, block_size=64, init_blocks=1, window_size=128, select_blocks=4)
SLOT_RATIOS = (1.0, 1.25, 1.5, 2.0)
SPARE_POLICIES = ("lru", "beta", "belady")
_CHAPTER = "specialnames"
_LONG = ("assumptions", "misses_per_head_step_by_layer", "kind", "trace", "model")  # stay in each replay.json


def document_text() -> str:
    """The chapter on special method names of Python's language reference, which every Python carries."""
    topics = pydoc_data.topics.topics
    text = topics.get(_CHAPTER, "")
    if len(text) < 8 * PROMPT_TOKENS:  # another Python may cut its chapters differently
        text += "\n\n".join(topics[name] for name in sorted(topics) if name != _CHAPTER)
    return text


def replay_plan() -> list[tuple[str, SparseConfig, str, int, str]]:
    """(name, budgets, method, slots, policy): slots and policies at the captured budgets, then other budgets."""
    k = SPARSE.topk
    plan = [("slots-1.00-exact", SPARSE, "nosa", k, "exact")]
    plan += [
        (f"slots-{ratio:.2f}-{policy}", SPARSE, "nosa", round(k * ratio), policy)
        for ratio in SLOT_RATIOS
        for policy in SPARE_POLICIES
    ]
    others = {
        "select-2": (SparseConfig(topk=k, window_size=128, select_blocks=2), "nosa"),
        "select-8": (SparseConfig(topk=k, window_size=128, select_blocks=8), "nosa"),
        "k-32": (SparseConfig(topk=32, window_size=256, select_blocks=8), "nosa"),
        "block-32": (SPARSE.with_block_size(32), "nosa"),
        "block-128": (SPARSE.with_block_size(128), "nosa"),
        "infllmv2": (SPARSE, "infllmv2"),
        "dma": (SPARSE, "dma"),
    }
    plan += [(f"budgets-{name}", sparse, method, sparse.topk, "exact") for name, (sparse, method) in others.items()]
    return plan


def run_demo(
    directory: Path,
    *,
    new_tokens: int,
    seed: int,
    overwrite: bool,
    say: Callable[[str], None],
    progress: Callable[[], AbstractContextManager[Progress]],
) -> dict[str, Any]:
    """Run every part and return the summary, also written to demo.json; each part is there whole or not at all."""
    start = time.perf_counter()
    seconds: dict[str, float] = {}

    def timed(name: str, begun: float) -> None:
        seconds[name] = round(time.perf_counter() - begun, 2)

    check_output(directory, overwrite=overwrite)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    write_text_whole(directory / DEMO_FILE, json.dumps({"kind": "demo", "complete": False}) + "\n")
    text = document_text()
    write_text_whole(directory / "document.txt", text)

    say(
        f"1/5 capture: {PROMPT_TOKENS:,} tokens of the Python language reference, {new_tokens} new tokens, "
        f"k = {SPARSE.topk} of {SPARSE.n_blocks(PROMPT_TOKENS)} blocks, so every step is sparse"
    )
    begun = time.perf_counter()
    request = CaptureRequest(
        sparse=SPARSE,
        prompts=(text,),
        max_new_tokens=new_tokens,
        max_prompt_tokens=PROMPT_TOKENS,
        record_scores=True,
        ignore_eos=True,
        sampling=SamplingParams(seed=seed),
    )
    with whole_directory(directory / "trace", overwrite=True) as partial, progress() as on_progress:
        capture = run_capture(request, partial, on_progress)
    timed("capture", begun)
    trace = Trace.open(directory / "trace")

    begun = time.perf_counter()
    check = check_document(trace)
    say(f"2/5 trace check: {check['n_rows']:,} rows, {check['n_problems']} break a rule or the locality bound")
    timed("check", begun)

    begun = time.perf_counter()
    plan = replay_plan()
    say(f"3/5 replay: {len(plan)} slot counts, policies and budgets")
    replays, skipped = _replay_all(directory, trace, plan, progress)
    timed("replay", begun)

    begun = time.perf_counter()
    recipe = shipped_recipe("demo_sweep.yaml", trace=directory / "trace", seed=seed)
    say(f"4/5 sweep: batch x link bandwidth x slots on hardware {recipe.hardware}, projected")
    with progress() as on_progress:
        sweep = run_sweep(recipe, directory / "sweep", workers=2, progress=on_progress)
    timed("sweep", begun)

    begun = time.perf_counter()
    say("5/5 report")
    page = build_page(load_inputs([directory]), title="NOSA demo: from a real document to a predicted throughput")
    write_text_whole(directory / "report.html", page.html)
    timed("report", begun)
    seconds["total"] = round(time.perf_counter() - start, 2)
    document = {
        "kind": "demo",
        "complete": True,
        "out": str(directory),
        "report": str(directory / "report.html"),
        "figures": len(page.figures),
        "capture": {key: value for key, value in capture.items() if key not in ("text", "sequences")},
        "check": check,
        "replays": replays,
        "replays_skipped": skipped,
        "sweep": sweep,
        "seconds": seconds,
    }
    write_text_whole(directory / DEMO_FILE, json.dumps(document, indent=1, allow_nan=False) + "\n")
    return document


def _replay_all(
    root: Path,
    trace: Trace,
    plan: list[tuple[str, SparseConfig, str, int, str]],
    progress: Callable[[], AbstractContextManager[Progress]],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run the plan; a configuration that this trace cannot serve is named, not hidden."""
    replays, skipped = [], []
    with progress() as on_progress:
        for index, (name, sparse, method, slots, policy) in enumerate(plan):
            on_progress("replay", index, len(plan))
            request = ReplayRequest(trace.directory, sparse, method, slots, policy)
            try:
                document = {**replay_document(request, trace), "name": name}
            except NosaError as error:
                skipped.append(f"{name}: {error}")
                continue
            folder = root / "replays" / name
            folder.mkdir(parents=True)
            write_text_whole(folder / "replay.json", json.dumps(document, indent=1, allow_nan=False) + "\n")
            replays.append({key: value for key, value in document.items() if key not in _LONG})
    return replays, skipped
