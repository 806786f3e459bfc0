"""Token-wise selection, blocks of one token: the kernels in Triton's interpreter, and compiled for 2048 of 8192."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from nosa_sys.kernels.aot import SHARED_MEMORY_LIMIT_BYTES, AotSpec, compile_for_sm90
from nosa_sys.kernels.block_selection.triton import AOT_SPECS as SELECT_SPECS
from nosa_sys.kernels.block_selection.triton import launch_plan
from nosa_sys.kernels.prefill_attention.triton import AOT_SPECS as ATTEND_SPECS

RUNNER = Path(__file__).parent / "interpreter" / "run_token_blocks.py"
N_TOKENS, TOPK = 8192, 2048


def test_single_tokens_are_selected_and_attended() -> None:
    done = subprocess.run(
        [sys.executable, str(RUNNER)], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    methods = [json.loads(line) for line in done.stdout.splitlines()]
    assert [different for different, _ in methods] == [[0, 0, 0]] * 3
    assert max(error for _, error in methods) < 5e-6


def changed(specs: list[AotSpec], name: str, num_warps: int, **constexprs: int) -> AotSpec:
    (spec,) = [spec for spec in specs if spec.name == name]
    assert set(constexprs) <= set(spec.constexprs)
    return dataclasses.replace(spec, constexprs={**spec.constexprs, **constexprs}, num_warps=num_warps)


def large() -> list[AotSpec]:
    """The launches of 2048 of 8192 single tokens on SmolLM2-135M: 3 KV heads, 16 queries a tile."""
    budget = {"KV_HEADS": 3, "TOPK": TOPK, "TOPK_PAD": TOPK, "BLOCKS_PAD": N_TOKENS}
    num_warps, radix_bits = launch_plan(N_TOKENS)
    picks = {"INIT": 64, "LOCAL": 512, "QUERY_AWARE": 511, "AGNOSTIC": 960, "RADIX_BITS": radix_bits}
    windows = {"KERNEL": 2, "STRIDE": 1, "BLOCK": 1, "RATIO": 1, "KEEP_POOLED": False}
    return [
        changed(ATTEND_SPECS, "union", 4, **budget, QUERIES=16, BLOCK=1),
        changed(SELECT_SPECS, "select-windows-4096", num_warps, **budget, **picks, **windows),
        changed(ATTEND_SPECS, "attend-selected-bf16-80-16", 4, KV_HEADS=3, DIM=64, DIM_PAD=64, BLOCK=1, BLOCK_PAD=1),
    ]


@pytest.mark.parametrize("spec", large(), ids=lambda spec: spec.name)
def test_a_quarter_of_8192_tokens_compiles_for_sm90(spec: AotSpec) -> None:
    assert compile_for_sm90(spec).metadata.shared <= SHARED_MEMORY_LIMIT_BYTES
