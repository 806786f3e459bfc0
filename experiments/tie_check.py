"""How far selections of two engines differ in a short type, and whether every difference is a near tie.

``python -m nosa_sys.experiments.tie_check --out FILE`` decodes the same forced tokens in bf16 on a GPU (fused steps)
and on a CPU (eager), and compares the sets of every row. A block that one side alone selects by its score should lie
close to the score of the last block selected: the gap is given relative to that score, beside bf16's spacing of 2^-8.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nosa_sys.engine.engine import Engine
from nosa_sys.engine.plan import StepPlan
from nosa_sys.kernels.block_pooling.reference import pool_windows
from nosa_sys.kernels.block_selection.reference import QUERY_AWARE
from nosa_sys.models.llama import LlamaModel
from nosa_sys.sparse_config import SparseConfig


@dataclass
class TieReport:
    """Over all rows, layers and heads of the steps compared: sets, sets that are equal, blocks on one side alone, and
    of those that either side took by score the largest and the mean gap to the last score taken, relative to it."""

    n_sets: int = 0
    n_equal: int = 0
    n_blocks_apart: int = 0
    n_by_score: int = 0
    largest_gap: float = 0.0
    mean_gap: float = 0.0

    def add(self, ours: StepPlan, theirs: StepPlan, sparse: SparseConfig) -> None:
        """Compare one step; ``theirs`` gives the scores."""
        assert ours.block_ids is not None
        assert theirs.block_ids is not None
        assert ours.origins is not None
        assert theirs.origins is not None
        pooled = pooled_scores(theirs, sparse)
        for place in np.ndindex(theirs.block_ids.shape[:3]):
            mine, other = by_origin(ours, place), by_origin(theirs, place)
            apart = mine.keys() ^ other.keys()
            self.n_sets += 1
            self.n_equal += not apart
            self.n_blocks_apart += len(apart)
            taken = [pooled[place][block] for block, origin in other.items() if origin == QUERY_AWARE]
            for block in apart:
                if {**mine, **other}[block] == QUERY_AWARE and taken:
                    gap = abs(float(pooled[place][block]) / float(min(taken)) - 1)
                    self.n_by_score += 1
                    self.largest_gap = max(self.largest_gap, gap)
                    self.mean_gap += (gap - self.mean_gap) / self.n_by_score


def by_origin(plan: StepPlan, place: tuple[int, ...]) -> dict[int, int]:
    """Origin of each selected block of one (layer, row, head)."""
    assert plan.block_ids is not None
    assert plan.origins is not None
    ids, origins = plan.block_ids[place], plan.origins[place]
    return {int(block): int(origin) for block, origin in zip(ids, origins, strict=True) if block >= 0}


def pooled_scores(plan: StepPlan, sparse: SparseConfig) -> NDArray[np.float32]:
    """Scores of blocks [layer, row, kv_head, block] out of the recorded ones of windows."""
    assert plan.window_scores is not None
    scores = torch.from_numpy(np.ascontiguousarray(plan.window_scores))
    counts = torch.tensor(plan.batch.windows).repeat(scores.shape[0])
    pooled = pool_windows(scores.flatten(0, 1), counts, plan.batch.max_blocks, sparse)
    return pooled.view(*scores.shape[:3], -1).numpy()


def compare(
    ours: LlamaModel, theirs: LlamaModel, sparse: SparseConfig, prompts: list[list[int]], tokens: int, **options: Any
) -> TieReport:
    """The same prompts with the same forced tokens on both; ``options`` go to the first engine."""
    engines = []
    for model, more in ((ours, options), (theirs, {"runner": "eager"})):
        engine = Engine(
            model, sparse, max_batch=len(prompts), inspect=True, record_scores=True, slots=sparse.topk, **more
        )
        for prompt in prompts:
            engine.add(prompt[:-tokens], tokens, force_tokens=prompt[-tokens:])
        engines.append(engine)
    report = TieReport()
    while not engines[0].idle:
        for engine in engines:
            engine.step()
        first, second = engines[0].last_plan, engines[1].last_plan
        assert first is not None
        assert second is not None
        report.add(first, second, sparse)
    return report


def main() -> None:
    from nosa_sys.experiments.engine_check import CPU_THREADS, SMOLLM2, document_tokens
    from nosa_sys.models.load import load_model

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=48)
    arguments = parser.parse_args()
    torch.set_num_threads(CPU_THREADS)
    loaded = load_model("smollm2-135m", dtype="bfloat16")
    text = document_tokens(loaded.tokenizer)
    prompts = [text[:1800], text[2000:4600]]
    gpu = load_model("smollm2-135m", dtype="bfloat16", device="cuda").model
    report = compare(gpu, loaded.model, SMOLLM2, prompts, arguments.tokens)
    document = {"kind": "tie check", **asdict(report), "bf16_spacing": 2.0**-8}
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
