"""Kernels of a training step: values and gradients in the interpreter, compilation for sm_90, selection, tile lists."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from nosa_sys.errors import ConfigError
from nosa_sys.kernels.aot import SHARED_MEMORY_LIMIT_BYTES, AotSpec, compile_for_sm90
from nosa_sys.kernels.compressed_keys.reference import window_means
from nosa_sys.kernels.prefill_attention.reference import prefill_selection
from nosa_sys.methods import get_method
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.training.attention import attend, select
from nosa_sys.training.attention_triton import AOT_SPECS, tile_lists
from tests.kernels.test_aot_sm90 import _spilled_bytes


def test_the_interpreter_agrees() -> None:
    """Attention against torch's in float64: output, then the gradients of q, k, v and beta; case 13: betas about 100,
    which scores in fp32 carry to 2^-17."""
    runner = Path(__file__).with_name("run_attention_kernels.py")
    command = [sys.executable, str(runner)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    cases: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == 10
    for case in cases:
        assert set(case["errors"]) == {"output", "q", "k", "v", "beta"} - (
            {"beta"} if case["case"] == "infllmv2" else set()
        )
        bound = 2e-5 if "large" in case["case"] else 2e-6
        assert all(error < bound for error in case["errors"].values()), case  # max() would pass a NaN over


@pytest.mark.parametrize("spec", [pytest.param(spec, id=spec.name) for spec in AOT_SPECS])
def test_kernels_compile_for_sm90_without_spills(spec: AotSpec) -> None:
    compiled = compile_for_sm90(spec)
    assert compiled.metadata.shared <= SHARED_MEMORY_LIMIT_BYTES
    assert _spilled_bytes(compiled.asm["cubin"]) == 0
    assert ("wgmma" in compiled.asm["ptx"]) == ("fp32" not in spec.name)


@pytest.mark.parametrize("n_tokens", [1, 64, 150, 300])
@pytest.mark.parametrize(("block_size", "rows", "cols"), [(16, 32, 64), (64, 64, 32), (48, 32, 64), (64, 128, 64)])
def test_tile_lists_hold_exactly_the_tiles_that_are_seen(n_tokens: int, block_size: int, rows: int, cols: int) -> None:
    """By tokens: a tile is walked when a query of it selected the block of a key of it, at or before the query's tile
    end; every tile with a pair that is seen is walked, from either side."""
    rng = torch.Generator().manual_seed(n_tokens)
    n_blocks = -(-n_tokens // block_size)
    member = torch.rand(2, n_tokens, n_blocks, generator=rng) < 0.2
    current = torch.arange(n_tokens) // block_size
    member &= torch.arange(n_blocks) <= current[:, None]
    member[:, torch.arange(n_tokens), current] = True
    lists = tile_lists(member, block_size, rows, cols)
    assert torch.equal(lists.member.bool(), member.transpose(1, 2))
    seen = member.repeat_interleave(block_size, 2)[..., :n_tokens] & torch.ones(n_tokens, n_tokens).tril().bool()
    for head in range(2):
        by_rows = {
            (tile, int(column))
            for tile, count in enumerate(lists.row_counts[head].tolist())
            for column in lists.row_tiles[head, tile, :count]
        }
        by_columns = {
            (int(row), tile)
            for tile, count in enumerate(lists.column_counts[head].tolist())
            for row in lists.column_tiles[head, tile, :count]
        }
        assert by_rows == by_columns
        queries, keys = seen[head].nonzero(as_tuple=True)
        needed = set(zip((queries // rows).tolist(), (keys // cols).tolist(), strict=True))
        assert needed <= by_rows
        chosen = member[head].repeat_interleave(block_size, 1).nonzero().tolist()
        assert by_rows <= {(query // rows, key // cols) for query, key in chosen}
        assert all(column * cols < (row + 1) * rows for row, column in by_rows)


def test_lists_are_contiguous_as_the_kernels_read_them() -> None:
    lists = tile_lists(torch.ones(2, 96, 6, dtype=torch.bool), 16, 32, 32)
    assert all(part.is_contiguous() for part in lists)


def test_a_cpu_without_interpreter_is_refused() -> None:
    x = torch.zeros(4, 1, 8)
    with pytest.raises(ConfigError, match="attention triton needs a GPU"):
        attend("triton", x, x, x, torch.zeros(4, 1), None, 16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["nosa", "infllmv2", "dma"])
def test_on_a_gpu_the_selection_is_the_references(method: str, dtype: torch.dtype) -> None:
    """The same inputs in fp32 on the CPU; scores that are equal to the last bits may fall on either side. A NaN is
    reported at its position."""
    cfg = SparseConfig(topk=8, init_blocks=1, window_size=64, select_blocks=4)
    rng = torch.Generator().manual_seed(0)
    q, k = torch.randn(2048, 9, 64, generator=rng).to(dtype), torch.randn(2048, 3, 64, generator=rng).to(dtype)
    beta = torch.randn(2048, 3, generator=rng)
    means = [window_means(x.float(), cfg.kernel_size, cfg.kernel_stride) for x in (k, beta)]
    key_means, beta_means = means[0].transpose(0, 1).contiguous(), means[1].T.contiguous()
    right = prefill_selection(q.float(), key_means, beta_means, 0, cfg, get_method(method)).block_ids
    got = select(q.cuda(), k.cuda(), beta.cuda(), cfg, get_method(method))
    assert got is not None
    assert got.errors is not None
    assert (got.block_ids.cpu() != right).float().mean() < 1e-3
    assert int(got.errors.amax()) == -1
    if method != "dma":
        q[1500, 4] = float("nan")
        broken = select(q.cuda(), k.cuda(), beta.cuda(), cfg, get_method(method))
        assert broken is not None
        assert broken.errors is not None
        assert (broken.errors >= 0).nonzero().tolist() == [[1500 - cfg.topk_tokens, 1]]
