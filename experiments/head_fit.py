"""An eviction head fitted to attention: betas that follow how much later queries attend to a token, as an adapter.

    python -m nosa_sys.experiments.head_fit --texts FOLDER_OR_TAR --out DIR [--adapter FILE]

An extension of ours: the paper trains the head by next-token loss alone. Each document goes through one prefill that
selects everything. A token's target is the mean attention it gets from queries whose window its block has left, over
what tokens of that age get on average: what its content alone says, since a beta knows no age. softplus(delta . v) is
fitted to the tokens' shares of it, layer by layer; A gives the betas of each KV head the spread ``--beta-std``. DIR has
adapter.safetensors (with the low-rank change of --adapter, if any) for load_model, and for `nosa train` to go on from:
``adapter: DIR/adapter.safetensors`` and ``fresh_head: false`` in a recipe.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from nosa_sys.cli import console
from nosa_sys.errors import ConfigError, NosaError
from nosa_sys.experiments.block_rankings import LayerInputs, record
from nosa_sys.experiments.decode_bench import facts
from nosa_sys.experiments.selection_ceiling import SPARSE
from nosa_sys.models.load import load_model
from nosa_sys.models.safetensors_reader import CheckpointTensors
from nosa_sys.models.weights import layer_name
from nosa_sys.outputs import check_output, whole_directory
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.training.export import ADAPTER, ADAPTER_LABEL
from nosa_sys.training.observation import token_shares
from nosa_sys.training.texts import excerpts, read_texts

_QUERIES_AT_ONCE = 64
_LARGEST_TARGET = 20.0  # times what tokens of the age get: a few tokens would be all that is fitted
_STEPS, _RATE = 120, 0.02


@torch.no_grad()
def token_targets(inputs: LayerInputs, positions: Tensor, cfg: SparseConfig) -> Tensor:
    """Attention of later queries to each token, over what its age gets: [token, kv_head] float32, 1 on average.

    Queries at ``positions`` [query] ascending count for the blocks that are neither sinks nor in their window. NaN for
    tokens that no query counts for.
    """
    size = cfg.block_size
    n_tokens, n_heads = inputs.k.shape[:2]
    token = torch.arange(n_tokens, device=inputs.k.device)
    block = token // size
    got = torch.zeros(n_heads, n_tokens, device=token.device)
    ages = positions.view(-1, 1) // size - block  # [query, token]
    counted = (ages > cfg.local_blocks) & (block >= cfg.init_blocks)
    by_age = torch.zeros(n_heads, int(ages.max()) + 1, device=token.device)
    for start in range(0, len(positions), _QUERIES_AT_ONCE):
        part = slice(start, start + _QUERIES_AT_ONCE)
        shares = token_shares(inputs.q[part], inputs.k, positions[part]).mean(2).float() * counted[part]
        got += shares.sum(1)
        by_age.scatter_add_(1, ages[part].clamp(min=0).flatten().expand(n_heads, -1), shares.flatten(1))
    counts = torch.bincount(ages[counted], minlength=by_age.shape[1]).clamp(min=1)
    typical = by_age / counts
    expected = torch.stack([(head[ages.clamp(min=0)] * counted).sum(0) for head in typical])
    return torch.where(counted.any(0), got / expected, torch.nan).T


def fit_delta(v: Tensor, targets: Tensor, *, decay: float) -> Tensor:
    """delta [kv_head, width] that brings softplus(delta . v) close to ``targets``, up to a factor a head.

    v [token, width], targets [token, kv_head] >= 0. The Kullback-Leibler divergence from the tokens' shares of the
    targets to their shares of softplus(delta . v), plus ``decay`` times delta's square, by Adam from delta = 0; v is
    scaled to a mean square of 1 for it.
    """
    scale = v.square().mean().sqrt().clamp(min=1e-12)
    features, wanted = v / scale, targets / targets.sum(0)
    delta = torch.zeros(targets.shape[1], v.shape[1], device=v.device, requires_grad=True)
    optimizer = torch.optim.Adam([delta], lr=_RATE)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        found = F.softplus(features @ delta.T)
        loss = (found.sum(0).log() - (wanted * found.log()).sum(0)).sum() + decay * delta.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return delta.detach() / scale


def fit_head(
    documents: list[list[LayerInputs]], positions: Tensor, cfg: SparseConfig, *, decay: float, beta_std: float
) -> dict[str, Tensor]:
    """A and delta of every layer by their names in a checkpoint, from the inputs of the documents' layers at
    ``positions`` [query]."""
    tensors = {}
    for layer, of_documents in enumerate(zip(*documents, strict=True)):
        targets = torch.cat([token_targets(inputs, positions, cfg) for inputs in of_documents])
        v = torch.cat([inputs.v.flatten(1).float() for inputs in of_documents])
        known = ~targets[:, 0].isnan()
        if not known.any():
            raise ConfigError("no token leaves the window; give documents longer than the window")
        delta = fit_delta(v[known], targets[known].clamp(max=_LARGEST_TARGET), decay=decay)
        spread = F.softplus(v[known] @ delta.T).std(0).clamp(min=1e-12)
        tensors[layer_name(layer, "self_attn.A")] = (beta_std / spread).cpu()
        tensors[layer_name(layer, "self_attn.delta.weight")] = delta.cpu()
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory of the adapter")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--adapter", type=Path, help="the model's present adapter; its low-rank change is kept")
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--context", type=int, default=4096, help="tokens of a document")
    parser.add_argument("--stride", type=int, default=16, help="every how many tokens a query counts")
    parser.add_argument("--decay", type=float, default=0.03)
    parser.add_argument("--beta-std", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--overwrite", action="store_true", help="replace what nosa left in --out before")
    arguments = parser.parse_args()
    try:
        check_output(arguments.out, overwrite=arguments.overwrite)
        tensors, label = fit(arguments)
        with whole_directory(arguments.out, overwrite=arguments.overwrite) as partial:
            save_file(tensors, partial / ADAPTER)
            (partial / ADAPTER_LABEL).write_text(json.dumps(label, indent=1) + "\n", encoding="utf-8")
    except NosaError as error:
        parser.exit(2, f"error: {error}\n")
    print(f"{arguments.out / ADAPTER}: {label['label']}")


def fit(arguments: argparse.Namespace) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of the adapter and its label, with a progress bar over documents. ConfigError for numbers that fit
    nothing."""
    for name, low in (("documents", 1), ("context", 2), ("stride", 1), ("seed", 0)):
        if getattr(arguments, name) < low:
            raise ConfigError(f"--{name} {getattr(arguments, name)} must be >= {low}")
    for name in ("decay", "beta_std"):
        if not 0 <= getattr(arguments, name) < np.inf:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be finite and >= 0")
    loaded = load_model(
        arguments.model, adapter=arguments.adapter, convert_dense=arguments.adapter is None, device=arguments.device
    )
    found = excerpts(
        read_texts(arguments.texts),
        loaded.tokenizer,
        length=arguments.context,
        count=arguments.documents,
        seed=arguments.seed,
    )
    dense = dataclasses.replace(SPARSE, topk=max(SPARSE.topk, SPARSE.n_blocks(arguments.context)))
    positions = torch.from_numpy(np.arange(arguments.stride - 1, arguments.context, arguments.stride))
    positions = positions.to(loaded.model.device)
    layers = []
    with console.progress(console.stderr()) as bar:
        task = bar.add_task("prefill of documents", total=len(found), note="")
        for _, tokens in found:
            layers.append(record(loaded.model, tokens, dense, positions))
            bar.advance(task)
    tensors: dict[str, Tensor] = {}
    if arguments.adapter is not None:
        opened = CheckpointTensors.open_file(arguments.adapter)
        tensors = {name: opened.take(name, entry.shape) for name, entry in opened.entries.items()}
    tensors |= fit_head(layers, positions, SPARSE, decay=arguments.decay, beta_std=arguments.beta_std)
    label = {
        "label": f"fitted to attention of {len(found)} documents of {arguments.context} tokens, seed {arguments.seed}",
        **facts(loaded.model),
        "settings": {"rope_theta": loaded.model.config.rope_theta},  # for load_model
        "documents": [document.name for document, _ in found],
        "decay": arguments.decay,
        "beta_std": arguments.beta_std,
        "stride": arguments.stride,
    }
    return tensors, label


if __name__ == "__main__":
    main()
