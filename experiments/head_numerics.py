"""Numerics of ED-DMA and DMA heads: finite values, ties and overflow at extreme inputs and on a trained head.

    python -m nosa_sys.experiments.head_numerics --out experiments/results/cpu/head_numerics [--device cuda]

Writes ``numerics.json``. Rows of part ``grid`` come from head inputs of -1000 to 1000 (``head_grid``), those of parts
``range``, ``precision`` and ``attention`` from a trained head on the language reference of Python
(``head_precision``). On a CPU the Triton kernel runs in Triton's interpreter; where Triton is not installed it is left
out, with a note. Two cores take about a minute.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nosa_sys.errors import ConfigError, NosaError
from nosa_sys.experiments.decode_bench import run_facts
from nosa_sys.experiments.head_grid import grid_rows
from nosa_sys.kernels.launch import NO_TRITON, choose_interpreter, require_triton
from nosa_sys.models.llama import LlamaModel
from nosa_sys.models.load import check_device, load_model
from nosa_sys.outputs import write_whole
from nosa_sys.sparse_config import SparseConfig

FILE = "numerics.json"
ADAPTER = Path(__file__).parent / "results/h200/equal_training/adapters/smollm2-135m-nosa-8k-seed0.safetensors"
TRAINED = SparseConfig(topk=32, window_size=512, select_blocks=8)  # the budgets that the adapter was trained under
N_QUERIES = 16


def document_rows(model: LlamaModel, tokens: list[int], sparse: SparseConfig, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of a trained head on ``tokens``; attention of N_QUERIES drawn queries beyond the budget.

    Raises ConfigError for fewer tokens than leave a choice."""
    from nosa_sys.experiments.head_precision import attention_rows, head_range, precision_rows, see_document

    first = sparse.topk_tokens
    if len(tokens) < first + N_QUERIES:
        raise ConfigError(f"{len(tokens)} tokens are all within k = {sparse.topk} blocks; give {first + N_QUERIES}")
    drawn = np.random.default_rng(seed).choice(np.arange(first, len(tokens)), N_QUERIES, replace=False)
    positions = sorted(drawn.tolist())
    with torch.no_grad():
        layers = see_document(model, tokens, sparse, positions)
        return [
            head_range(model, layers),
            *precision_rows(model, layers, sparse),
            *attention_rows(model, layers, positions, sparse),
        ]


def main(arguments: list[str] | None = None) -> int:
    """Measure and write; 2 for a wrong request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--adapter", type=Path, default=ADAPTER, help="safetensors file of a trained head")
    parser.add_argument("--tokens", type=int, default=4096, help="of the document; 0: the grid alone")
    options = parser.parse_args(arguments)
    try:
        check_device(options.device)
        device = torch.device(options.device)
        notes = []
        if device.type == "cuda":
            require_triton()
        elif not choose_interpreter():
            notes.append(f"without the Triton kernel: {NO_TRITON}")
            say(notes[0])
        rows = list(grid_rows(device))
        say(f"{len(rows)} rows of the grid, {count_not_finite(rows)} values not finite")
        if options.tokens:
            from nosa_sys.experiments.engine_check import document_tokens

            loaded = load_model("smollm2-135m", device=options.device, adapter=options.adapter)
            notes += loaded.notes
            rows += document_rows(loaded.model, document_tokens(loaded.tokenizer)[: options.tokens], TRAINED)
    except NosaError as error:
        print(error, file=sys.stderr)
        return 2
    for row in rows:
        if row["part"] != "grid":
            say(json.dumps(row))
    options.out.mkdir(parents=True, exist_ok=True)
    document = {
        "kind": "head numerics",
        "status": "measured",
        "facts": run_facts(options.device),
        "notes": notes,
        "n_tokens": options.tokens,
        "sparse": TRAINED.to_dict(),
        "rows": rows,
    }
    write_whole(options.out / FILE, json.dumps(document, indent=1) + "\n", overwrite=True)
    return 0


def count_not_finite(rows: list[dict[str, Any]]) -> int:
    """Over all rows of the grid and all that they counted: scores, window means, attention, gradients."""
    return sum(value for row in rows for name, value in row.items() if name.endswith("_not_finite"))


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
