"""Correctness of the fused engine on CUDA: tokens and selections against the CPU engine, all schedules and methods.

``python -m nosa_sys.experiments.engine_check reference FILE`` decodes 2,000 tokens with SmolLM2 on a CPU (fp32,
reference kernels, one run a method) and keeps tokens and a digest of each row's selection. ``... check --out DIR
[--reference FILE]`` compares the CUDA engine with it, and with small random models decoded on the CPU meanwhile.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nosa_sys.engine.engine import Engine
from nosa_sys.engine.plan import StepPlan
from nosa_sys.engine.sampling import SamplingParams
from nosa_sys.model_shape import ModelShape
from nosa_sys.models.llama import LlamaModel
from nosa_sys.models.random import random_model
from nosa_sys.sparse_config import SparseConfig

METHODS = ("nosa", "infllmv2", "dma", "full")
SCHEDULES = ("serial", "fused_kv", "split_merge", "two_batch", "prefetch")
SMALL_SHAPE = ModelShape("small", 3, 8, 2, 64, 256, 512, 512, dtype="float32")
SMALL = SparseConfig(topk=8, window_size=128, select_blocks=3)
# (prompt tokens, new tokens): over block and window edges, shorter and longer than the budget
SMALL_REQUESTS = ((700, 70), (1, 90), (33, 140), (511, 66), (900, 20), (64, 65))
SMOLLM2 = SparseConfig(topk=16, window_size=256, select_blocks=4)
SMOLLM2_REQUESTS = ((33, 250), (100, 250), (150, 250), (700, 250), (1024, 250), (1500, 250), (2300, 250), (3000, 250))
MAX_BATCH = 3  # requests wait, join and leave
CPU_THREADS = 4  # small tensors: more threads wait for one another, and processes run side by side


def document_tokens(model_tokenizer: Any) -> list[int]:
    """A real text of any length: the language reference that every Python carries."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return list(model_tokenizer.encode(text[:60000]))


def smollm2_requests(tokenizer: Any) -> list[tuple[list[int], int]]:
    tokens = document_tokens(tokenizer)
    return [(tokens[97 * i : 97 * i + n], new) for i, (n, new) in enumerate(SMOLLM2_REQUESTS)]


def small_requests() -> list[tuple[list[int], int]]:
    rng = np.random.default_rng(3)
    return [(rng.integers(0, SMALL_SHAPE.vocab_size, n).tolist(), new) for n, new in SMALL_REQUESTS]


def digests(plan: StepPlan) -> Iterator[tuple[int, str]]:
    """(sequence, digest of its selection over layers and heads) of each row."""
    assert plan.block_ids is not None
    for row, sequence in enumerate(plan.batch.sequences):
        n = min(plan.batch.blocks[row], plan.block_ids.shape[-1])
        ids = np.ascontiguousarray(plan.block_ids[:, row, :, :n], dtype="<i4")
        yield sequence, hashlib.sha256(ids.tobytes()).hexdigest()[:16]


def decode(model: LlamaModel, sparse: SparseConfig, requests: list, **options: Any) -> dict[str, Any]:
    """Tokens and selection digests of every request, by sequence."""
    engine = Engine(model, sparse, max_batch=MAX_BATCH, poison=math.nan, **options)
    for seed, (prompt, new) in enumerate(requests):
        drawn = sparse is SMALL and seed % 2
        sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=seed) if drawn else SamplingParams()
        engine.add(prompt, new, sampling=sampling)
    found: dict[int, list[str]] = {}
    while not engine.idle:
        engine.step()
        if engine.last_plan is not None and engine.last_plan.block_ids is not None:
            for sequence, digest in digests(engine.last_plan):
                found.setdefault(sequence, []).append(digest)
    return {"tokens": engine.outputs, "selections": found, "summary": engine.summary()}


def options_of(schedule: str, method: str, sparse: SparseConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"method": method, "schedule": schedule}
    return options | ({"slots": sparse.topk + 3, "policy": "lru"} if schedule == "prefetch" else {})


def compare(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """How far tokens and selections agree: equal counts up to each sequence's first difference."""
    n_tokens = n_equal = n_rows = n_same = 0
    first = None
    for key, tokens in expected["tokens"].items():
        mine = found["tokens"][key]
        same = next((i for i, (a, b) in enumerate(zip(mine, tokens, strict=True)) if a != b), len(tokens))
        n_tokens, n_equal = n_tokens + len(tokens), n_equal + same
        if same < len(tokens) and first is None:
            first = f"sequence {key}, token {same}"
        if found["selections"] and expected["selections"].get(key):
            pairs = list(zip(found["selections"][key], expected["selections"][key], strict=True))[: same + 1]
            n_rows, n_same = n_rows + len(pairs), n_same + sum(a == b for a, b in pairs)
    return {
        "tokens": n_tokens,
        "tokens_equal": n_equal,
        "first_difference": first,
        "rows": n_rows,
        "rows_equal": n_same,
    }


def cells(sparse: SparseConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, engine options) of everything that must give the same tokens."""
    for method in METHODS:
        for schedule in SCHEDULES:
            if method != "full" or schedule not in ("prefetch",):
                yield f"{method} {schedule}", options_of(schedule, method, sparse)
    for method in ("nosa", "infllmv2"):
        yield f"{method} on the device", {"method": method, "offload": False}
        for policy in ("lru", "beta"):
            more = {"method": method, "slots": int(1.5 * sparse.topk), "policy": policy, "schedule": "two_batch"}
            yield f"{method} hot buffer {policy}", more
        yield f"{method} selections", {"method": method, "inspect": True}
    yield "nosa eager on CUDA", {"method": "nosa", "runner": "eager"}
    yield "nosa without capture", {"method": "nosa", "runner": "kernels", "schedule": "split_merge"}


def check_model(
    name: str,
    model: LlamaModel,
    sparse: SparseConfig,
    requests: list,
    expected: dict[str, Any],
    share: tuple[int, int] = (0, 1),
) -> list[dict[str, Any]]:
    """A row a cell; of share (i, n) every n-th cell from the i-th."""
    rows = []
    for cell, options in itertools.islice(cells(sparse), share[0], None, share[1]):
        start = time.perf_counter()
        try:
            found = decode(model, sparse, requests, **options)
            outcome = compare(found, expected[options["method"]])
            rate = found["summary"]["tokens_per_s"]
        except Exception as error:  # a cell that breaks is a row of the table, not the end of it
            outcome, rate = {"error": f"{type(error).__name__}: {error}"[:300]}, None
        seconds = time.perf_counter() - start
        rows.append({"model": name, "cell": cell, **outcome, "tokens_per_s": rate, "seconds": round(seconds, 2)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def reference(path: Path) -> None:
    from nosa_sys.models.load import load_model

    loaded = load_model("smollm2-135m", dtype="float32")
    requests = smollm2_requests(loaded.tokenizer)
    document: dict[str, Any] = {"prompts": [prompt for prompt, _ in requests]}
    for method in METHODS:
        found = decode(loaded.model, SMOLLM2, requests, method=method)
        document[method] = {key: {str(s): v for s, v in found[key].items()} for key in ("tokens", "selections")}
        path.write_text(json.dumps(document), encoding="utf-8")
        print(method, found["summary"]["tokens_per_s"], flush=True)


def small_checks(share: tuple[int, int]) -> list[dict[str, Any]]:
    requests = small_requests()
    cpu = random_model(SMALL_SHAPE, 11)
    expected = {}
    for method in METHODS:
        expected[method] = decode(cpu, SMALL, requests, method=method, inspect=True)
    gpu = random_model(SMALL_SHAPE, 11, device="cuda")
    move_weights(cpu, gpu)
    return check_model("small random, fp32", gpu, SMALL, requests, expected, share)


def move_weights(source: LlamaModel, target: LlamaModel) -> None:
    """Give a model on another device the very weights of ``source``."""
    for name in ("embedding", "final_norm", "lm_head"):
        getattr(target, name).copy_(getattr(source, name))
    for mine, theirs in zip(target.layers, source.layers, strict=True):
        for name, tensor in vars(theirs).items():
            getattr(mine, name).copy_(tensor)


def smollm2_checks(path: Path, share: tuple[int, int]) -> list[dict[str, Any]]:
    from nosa_sys.models.load import load_model

    document = json.loads(path.read_text(encoding="utf-8"))
    expected = {}
    for method in METHODS:
        expected[method] = {
            key: {int(s): v for s, v in document[method][key].items()} for key in ("tokens", "selections")
        }
    requests = [(prompt, new) for prompt, (_, new) in zip(document["prompts"], SMOLLM2_REQUESTS, strict=True)]
    model = load_model("smollm2-135m", dtype="float32", device="cuda").model
    return check_model("smollm2-135m, fp32", model, SMOLLM2, requests, expected, share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("reference", "check"))
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--share", default="0/1", help="I/N: every N-th cell from the I-th, for processes side by side")
    arguments = parser.parse_args()
    if arguments.what == "reference":
        reference(arguments.file)
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    first, _, of = arguments.share.partition("/")
    share = int(first), int(of)
    rows = smollm2_checks(arguments.reference, share) if arguments.reference else small_checks(share)
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = "engine_check_smollm2" if arguments.reference else "engine_check_small"
    name += f"-{share[0]}-of-{share[1]}.json" if share[1] > 1 else ".json"
    (arguments.out / name).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    bad = [r["cell"] for r in rows if "error" in r or r["tokens_equal"] < r["tokens"]]
    print(f"{len(rows) - len(bad)} of {len(rows)} cells equal; not equal: {bad}")


if __name__ == "__main__":
    main()
