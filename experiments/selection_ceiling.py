"""How much attention mass a selection could keep at best: picks by query, fill by beta, ideal orders in their place.

    python -m nosa_sys.experiments.selection_ceiling --out FILE [--adapter FILE] [--texts FOLDER_OR_TAR]

One prefill a document with NOSA's selection; at drawn positions of its second half, and over a run of consecutive ones,
every rule of ``RULES`` selects from the same queries and keys. Mass is of softmax attention over everything, plain and
with beta (as NOSA attends). Misses are those of decoding the run with slots = k and with LRU in 1.25 k slots. A
document is cut as `nosa eval` cuts it; without --texts it is the language reference of this Python.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from nosa_sys.cli import console
from nosa_sys.engine.setup import default_prefill_chunk
from nosa_sys.errors import ConfigError, NosaError
from nosa_sys.experiments.block_rankings import Rankings, Rule, block_mass, mass_inside, record, select
from nosa_sys.experiments.decode_bench import facts
from nosa_sys.experiments.engine_check import document_tokens
from nosa_sys.methods import get_method
from nosa_sys.models.llama import LlamaModel
from nosa_sys.models.load import load_model
from nosa_sys.models.tokenizer import Tokenizer
from nosa_sys.slot_count import slots_of
from nosa_sys.sparse_config import SparseConfig
from nosa_sys.traces.replay import misses_of, serve
from nosa_sys.traces.reuse import block_uses
from nosa_sys.traces.rows import SelectionRows
from nosa_sys.training.texts import excerpts, read_texts

SPARSE = SparseConfig(topk=32, init_blocks=1, window_size=512, select_blocks=8)
RULES = (
    Rule("InfLLMv2", "infllmv2"),
    Rule("NOSA", "nosa"),
    Rule("DMA", "dma"),
    Rule("ceiling: best by true mass", "infllmv2", picks="mass"),
    Rule("picks by true mass, fill by beta", picks="mass"),
    Rule("picks by true mass, fill by later mass", picks="mass", fill="later_mass"),
    Rule("fill: later mass (static, ideal)", fill="later_mass"),
    Rule("fill: later mass unpicked (static, ideal)", fill="later_mass_unpicked"),
    Rule("fill: later mass for its age (static, ideal)", fill="later_mass_for_age"),
    Rule("fill: mass for its age and slope (static, ideal)", fill="later_mass_with_slope"),
    Rule("no pick, fill: mass for its age and slope", "dma", fill="later_mass_with_slope"),
    Rule("no pick, fill: later mass (static, ideal)", "dma", fill="later_mass"),
    Rule("no pick, fill: recent", "dma", fill="recent"),
    Rule("no pick, fill: random order", "dma", fill="drawn"),
    Rule("fill: past mass (causal)", fill="past_mass"),
    Rule("fill: past scores (causal)", fill="past_scores"),
    Rule("fill: beta, mean of block", fill="beta_mean"),
    Rule("fill: beta, log-sum-exp of block", fill="beta_log_sum_exp"),
    Rule("fill: small key norms", fill="small_key_norms"),
    Rule("fill: large key norms", fill="large_key_norms"),
    Rule("fill: recent", fill="recent"),
    Rule("fill: random order", fill="drawn"),
)
MORE_PICKS = (1, 2, 4, 8)  # query-aware blocks beyond the budget's own, for betas and the ideal order
WINDOWS = (1.5, 2.0)  # times the budget's own, then the widest that leaves the picks alone
SLOT_FACTORS = (1.0, 1.25)
KINDS = ("plain", "biased")
OnLayer = Callable[[int], None]


@dataclass(frozen=True)
class Settings:
    """``positions`` are drawn from a document's second half, ``run`` consecutive ones lie in the middle of it; mass is
    averaged over every ``stride``-th query of the document. The first third of the run warms the slots up."""

    topks: tuple[int, ...] = (32, 16)
    positions: int = 256
    run: int = 600
    stride: int = 16
    seed: int = 0

    def budgets(self) -> list[SparseConfig]:
        return [SPARSE.with_topk(k) for k in self.topks]


def rules_of(cfg: SparseConfig) -> list[Rule]:
    """RULES, and where the budget has the room: more query-aware blocks (betas and the ideal order), wider windows."""
    room = cfg.topk - cfg.query_budget  # blocks of the budget that neither picks nor forced ones need
    selects = [cfg.select_blocks + n for n in MORE_PICKS if n <= room]
    widest = cfg.local_blocks + room
    windows = [n for n in (int(cfg.local_blocks * factor) for factor in WINDOWS) if cfg.local_blocks < n < widest]
    return [
        *RULES,
        *(Rule(f"NOSA, select {n}", select_blocks=n) for n in selects),
        *(Rule(f"fill: later mass, select {n}", fill="later_mass", select_blocks=n) for n in selects),
        *(Rule(f"NOSA, window {n}", local_blocks=n) for n in [*windows, widest]),
        *(Rule(f"fill: later mass, window {n}", fill="later_mass", local_blocks=n) for n in windows),
    ]


@dataclass(frozen=True)
class Places:
    """Query positions [query] ascending, and the indices among them of the grid, the drawn ones and the run."""

    positions: Tensor
    grid: Tensor
    drawn: Tensor
    run: Tensor


def places(n_tokens: int, cfg: SparseConfig, settings: Settings) -> Places:
    """Where to look in a document; ConfigError when its second half is too short for the run or not sparse."""
    half = n_tokens // 2
    if half < cfg.topk_tokens or settings.run > n_tokens - half or settings.positions > n_tokens - half:
        raise ConfigError(
            f"{n_tokens} tokens: their second half must be longer than run={settings.run} and "
            f"positions={settings.positions}, and begin at {cfg.topk_tokens} tokens or later; give a longer context"
        )
    grid = np.arange(settings.stride - 1, n_tokens, settings.stride)
    drawn = half + np.random.default_rng(settings.seed).choice(n_tokens - half, settings.positions, replace=False)
    run = np.arange(settings.run) + half + (n_tokens - half - settings.run) // 2
    every = np.unique(np.concatenate([grid, drawn, run]))
    indices = (torch.from_numpy(np.searchsorted(every, np.sort(part))) for part in (grid, drawn, run))
    return Places(torch.from_numpy(every), *indices)


# ---- misses
def run_rows(block_ids: np.ndarray, first_position: int) -> SelectionRows:
    """Selections [layer, step, kv_head, k] of consecutive positions as rows of a trace."""
    n_layers, n_steps, n_heads, k = block_ids.shape
    layer, step, head = (index.ravel() for index in np.indices((n_layers, n_steps, n_heads)))
    zeros = np.zeros(len(step), dtype=np.int64)
    return SelectionRows(
        step=step,
        position=first_position + step,
        sequence=zeros,
        layer=layer,
        kv_head=head,
        n_misses=zeros,
        h2d_bytes=zeros,
        gamma=np.full(len(step), np.nan),
        cold=step == 0,
        block_ids=block_ids.ravel(),
        origins=np.zeros(block_ids.size, dtype=np.int8),
        offsets=np.arange(len(step) + 1, dtype=np.int64) * k,
    )


def misses_a_step(block_ids: np.ndarray, first_position: int, cfg: SparseConfig, warm_up: int) -> dict[str, float]:
    """Misses a head and step of a run [layer, step, kv_head, k] after ``warm_up`` steps, by slots over k."""
    uses = block_uses(run_rows(block_ids, first_position))
    warm = uses.rows.step >= max(1, warm_up)
    found = {}
    for factor in SLOT_FACTORS:
        policy = "exact" if factor == 1 else "lru"
        loaded = serve(uses, cfg, get_method("nosa"), slots_of(factor, cfg.topk), policy)
        found[f"misses_{factor:g}k"] = float(misses_of(uses, loaded)[warm].mean())
    return found


# ---- one document
def measure(
    model: LlamaModel,
    tokens: list[int],
    budgets: list[SparseConfig],
    settings: Settings,
    on_layer: OnLayer | None = None,
) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    """One document, whose prefill selects with the first budget: rows (topk, rule, attention, mass by layer, and in
    plain attention misses), and ``beta_facts`` by layer.

    ``on_layer`` hears of every layer twice and more: as each chunk of the prefill comes to it, and when it is compared.
    """
    where = places(len(tokens), budgets[0], settings)
    where = Places(*(part.to(model.device) for part in (where.positions, where.grid, where.drawn, where.run)))
    layers = record(model, tokens, budgets[0], where.positions, on_layer)
    mass: dict[tuple[int, str, str], list[float]] = {}
    runs: dict[tuple[int, str, str], list[Tensor]] = {}
    betas: list[dict[str, float]] = []
    for layer, inputs in enumerate(layers):
        for kind in KINDS:
            attention = block_mass(inputs, where.positions, budgets[0].block_size, biased=kind == "biased")
            for cfg in budgets:
                rankings = Rankings(inputs, where.positions, where.grid, cfg, attention, settings.seed)
                looked_at = torch.cat([where.drawn, where.run]) if kind == "plain" else where.drawn
                values = _values(rankings, rules_of(cfg), looked_at)
                for rule in rules_of(cfg):
                    key = (cfg.topk, kind, rule.name)
                    ids = select(rule, values, rankings.n_blocks[looked_at], cfg)
                    n = len(where.drawn)
                    inside = mass_inside(attention[where.drawn], ids[:n])
                    mass.setdefault(key, []).append(float(inside.mean()))
                    if kind == "plain":
                        runs.setdefault(key, []).append(ids[n:].cpu())
                if kind == "plain" and cfg is budgets[0]:
                    betas.append(beta_facts(rankings))
                whole = attention[where.drawn].topk(cfg.topk, dim=-1).values.sum(-1)
                mass.setdefault((cfg.topk, kind, ANY_BLOCKS), []).append(float(whole.mean()))
        if on_layer is not None:
            on_layer(layer)
    first = int(where.positions[where.run[0]])
    rows = []
    for (topk, kind, name), by_layer in mass.items():
        row: dict[str, Any] = {"topk": topk, "attention": kind, "rule": name, "mass_by_layer": by_layer}
        chosen = runs.get((topk, kind, name))
        if chosen:
            cfg = next(cfg for cfg in budgets if cfg.topk == topk)
            row |= misses_a_step(torch.stack(chosen).numpy(), first, cfg, settings.run // 3)
        rows.append(row)
    return rows, {key: [facts_of_layer[key] for facts_of_layer in betas] for key in betas[0]}


def beta_facts(rankings: Rankings) -> dict[str, float]:
    """Of the pooled betas that the last query can rank by, KV heads averaged: their standard deviation, and their rank
    correlation with the mean true mass of later queries (0 where all are equal)."""
    last = slice(rankings.cfg.init_blocks, int(rankings.n_blocks[-1]) - 1 - rankings.cfg.local_blocks)
    beta, later = (
        values[-1, :, last].double().cpu().numpy() for values in (rankings.beta_max(), rankings.later_mass())
    )
    ranks = [
        np.corrcoef(rankdata(b), rankdata(m))[0, 1] if np.ptp(b) and np.ptp(m) else 0.0
        for b, m in zip(beta, later, strict=True)
    ]
    return {"pooled_beta_std": float(beta.std(1).mean()), "rank_correlation": float(np.mean(ranks))}


ANY_BLOCKS = "any k blocks, none forced"


def _values(rankings: Rankings, rules: list[Rule], at: Tensor) -> dict[str, Tensor]:
    """Every ranking that the rules name, at the queries ``at``."""
    found = {}
    for name in {name for rule in rules for name in (rule.picks, rule.fill)}:
        member = getattr(rankings, name)
        found[name] = (member() if callable(member) else member)[at]
    return found


# ---- all documents
def summarize(documents: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for every (topk, attention, rule): mass and misses over documents, mass by layer and by document."""
    rows = []
    for same in zip(*documents, strict=True):
        by_layer = np.array([row["mass_by_layer"] for row in same])
        row = {key: same[0][key] for key in ("topk", "attention", "rule")}
        row["mass"] = float(by_layer.mean())
        for key in ("misses_1k", "misses_1.25k"):
            if key in same[0]:
                row[key] = float(np.mean([other[key] for other in same]))
        row["mass_by_document"] = by_layer.mean(1).tolist()
        row["mass_by_layer"] = by_layer.mean(0).tolist()
        rows.append(row)
    return rows


def table_rows(rows: list[dict[str, Any]], topk: int) -> list[list[Any]]:
    """Rule, mass in plain and biased attention, misses at slots = k and 1.25 k, best plain mass first."""
    plain = {row["rule"]: row for row in rows if row["topk"] == topk and row["attention"] == "plain"}
    biased = {row["rule"]: row for row in rows if row["topk"] == topk and row["attention"] == "biased"}
    return [
        [name, f"{row['mass']:.3f}", f"{biased[name]['mass']:.3f}", row.get("misses_1k"), row.get("misses_1.25k")]
        for name, row in sorted(plain.items(), key=lambda item: -item[1]["mass"])
    ]


def read_documents(
    texts: Path | None, tokenizer: Tokenizer, *, length: int, count: int, seed: int
) -> list[tuple[str, list[int]]]:
    """(name, tokens) of each document."""
    if texts is not None:
        found = excerpts(read_texts(texts), tokenizer, length=length, count=count, seed=seed)
        return [(document.name, tokens) for document, tokens in found]
    tokens = document_tokens(tokenizer)[:length]
    if len(tokens) < length:
        raise ConfigError(f"the default document has {len(tokens)} tokens, {length} are asked for; give --texts")
    return [("language reference of this Python", tokens)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the result, JSON")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--context", type=int, default=8192, help="tokens of a document")
    parser.add_argument("--positions", type=int, default=Settings.positions)
    parser.add_argument("--run", type=int, default=Settings.run)
    parser.add_argument("--stride", type=int, default=Settings.stride)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    try:
        document = run(arguments)
    except NosaError as error:
        parser.exit(2, f"error: {error}\n")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    columns = ("rule", "mass, plain", "mass, with beta", "misses, k slots", "misses, 1.25 k")
    for topk in document["settings"]["topks"]:
        title = f"k = {topk}, measured on {document['device']}"
        console.human(False).print(console.table(title, columns, table_rows(document["rows"], topk)))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Load, measure document by document with a progress bar, and put the result together."""
    settings = Settings(positions=arguments.positions, run=arguments.run, stride=arguments.stride, seed=arguments.seed)
    loaded = load_model(arguments.model, adapter=arguments.adapter, device=arguments.device)
    documents = read_documents(
        arguments.texts,
        loaded.tokenizer,
        length=arguments.context,
        count=arguments.documents,
        seed=arguments.seed,
    )
    model, measured = loaded.model, []
    chunks = math.ceil(arguments.context / default_prefill_chunk(model.device.type))
    with console.progress(console.stderr()) as bar:
        for name, tokens in documents:
            task = bar.add_task(f"{name[:40]}: layers", total=model.n_layers * (chunks + 1), note="")
            measured.append(
                measure(model, tokens, settings.budgets(), settings, lambda _, task=task: bar.advance(task))  # type: ignore[misc]
            )
    return {
        "kind": "selection ceiling",
        **facts(model),
        "notes": loaded.notes,
        "settings": {**asdict(settings), "context": arguments.context, "sparse": SPARSE.to_dict()},
        "documents": [name for name, _ in documents],
        "betas": {key: np.mean([betas[key] for _, betas in measured], axis=0).tolist() for key in measured[0][1]},
        "rows": summarize([rows for rows, _ in measured]),
    }


if __name__ == "__main__":
    main()
