"""Cases of the set difference: the plain operation, and the whole step plan with its global load list."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nosa_sys.kernels.case import Case, Operation, Tensors
from nosa_sys.kernels.set_difference import LoadList, TokenRows, reference

_RANKS = {0: torch.int64, 1: torch.float32}
_POISON = 777


def _case(name: str, uses: str, dtype: str = "float32", **params: int) -> Case:
    """n_rows rows, k wanted of n_blocks ids, slots resident; padding and repeats in per cent of the wanted list,
    unknown pages of the table. ``split``: hits and misses apart; ``guess``: a prefetch, which touches its loads alone
    and counts wasted blocks. ``token``: the step's token of type ``dtype`` is written, its beta too (1), where loads
    bring none (2), or K and V alone (3)."""
    defaults = {"n_rows": 4, "k": 8, "slots": 8, "n_blocks": 24, "keep": 0, "float_rank": 0}
    defaults |= {"padding": 20, "repeats": 0, "empty": 20, "hits": 50, "heads": 2, "block": 16}
    defaults |= {"split": 0, "guess": 0, "unknown_pages": 0, "token": 0, "head_dim": 64}
    return Case(name, dtype, {**defaults, **params}, frozenset(uses.split()))


def check_cases() -> list[Case]:
    both = "check small"
    return [
        _case("exact", both, n_rows=6),
        _case("exact-repeats", both, repeats=40, k=13, slots=16),
        _case("hot-buffer-int-rank", both, n_rows=5, keep=1, slots=13, n_blocks=40),
        _case("hot-buffer-float-rank", both, keep=1, slots=12, float_rank=1, repeats=30),
        _case("all-padding", both, padding=100, keep=1),
        _case("all-hits", both, hits=100, padding=0, empty=0),
        _case("all-slots-empty", both, empty=100, keep=1),
        _case("k1-slots1", both, k=1, slots=1, n_blocks=3),
        _case("k3-slots5", both, k=3, slots=5, n_blocks=9, keep=1),
        _case("k48-slots64", both, k=48, slots=64, n_blocks=90, keep=1, n_rows=2),
        _case("k65-slots130", "check", k=65, slots=130, n_blocks=400, keep=1, n_rows=16, repeats=10),
        _case("k64-exact", "check", k=64, slots=64, n_blocks=256, n_rows=130),
        _case("k64-slots128", "check", k=64, slots=128, n_blocks=1024, n_rows=130, keep=1),
        _case("k256-slots300", "check", k=256, slots=300, n_blocks=1024, n_rows=16, keep=1, float_rank=1),
        _case("k1025-slots1025", "check", k=1025, slots=1025, n_blocks=3000, n_rows=6, repeats=5),
        _case("k1025-slots1300", "check", k=1025, slots=1300, n_blocks=3000, n_rows=6, keep=1),
    ]


def plan_cases() -> list[Case]:
    """What only the step plan can do."""
    both = "check small"
    return [
        _case("split-exact", both, n_rows=11, split=1, unknown_pages=20, heads=3),
        _case("split-hot", both, n_rows=6, keep=1, slots=13, n_blocks=40, split=1, repeats=20),
        _case("guess", both, n_rows=6, keep=1, slots=13, n_blocks=40, guess=1, unknown_pages=20),
        _case("token-exact", both, n_rows=10, token=1),
        _case("token-bf16-d128", both, "bfloat16", n_rows=6, heads=3, keep=1, slots=13, token=1, head_dim=128),
        _case("token-d80-split", both, n_rows=6, keep=1, slots=13, split=1, repeats=20, token=1, head_dim=80),
        _case("token-without-beta", both, "bfloat16", n_rows=10, token=2, head_dim=80, block=24),
        _case("token-kv-alone", both, "float16", n_rows=5, heads=1, token=3, head_dim=96),
        _case("token-k65", "check", "bfloat16", k=65, slots=130, n_blocks=400, keep=1, n_rows=66, token=1),
        _case("split-k64-slots80", "check", k=64, slots=80, n_blocks=400, n_rows=130, keep=1, split=1),
        _case("split-guess-k256", "check", k=256, slots=300, n_blocks=1024, n_rows=18, keep=1, split=1, guess=1),
    ]


def bench_cases() -> list[Case]:
    steady: dict[str, Any] = {"padding": 0, "empty": 0, "hits": 85}
    return [
        _case(f"b{rows}-k{k}-s{slots}", "bench", n_rows=rows, k=k, slots=slots, n_blocks=n, keep=slots > k, **steady)
        for rows, k, slots, n in (
            (128, 64, 64, 256),
            (128, 64, 80, 256),
            (128, 64, 128, 256),
            (32, 64, 64, 2048),
            (512, 64, 64, 256),
            (128, 32, 40, 128),
            (128, 256, 320, 1024),
        )
    ] + [
        _case("b128-k64-s80-split", "bench", n_rows=128, k=64, slots=80, n_blocks=256, keep=1, split=1, **steady),
        _case("b128-k64-token", "bench", "bfloat16", n_rows=128, k=64, slots=64, token=1, head_dim=128, **steady),
    ]


def _wanted(case: Case, generator: torch.Generator, resident: Tensor) -> Tensor:
    """Random lists [row, k]: a share of hits, the rest of other ids, then padding and repeats put in."""
    p, device = case.params, generator.device
    rows, k = p["n_rows"], p["k"]
    resident_first = torch.zeros((rows, p["n_blocks"] + 1), device=device)
    resident_first.scatter_(1, torch.where(resident < 0, p["n_blocks"], resident).long(), 1.0)
    chance = torch.rand((rows, p["n_blocks"]), generator=generator, device=device)
    hits = (k * p["hits"]) // 100
    order = (chance + resident_first[:, :-1]).argsort(dim=1, descending=True)
    others = (chance - resident_first[:, :-1]).argsort(dim=1, descending=True)
    wanted = torch.cat([order[:, :hits], others[:, : k - hits]], dim=1).int()
    shuffle = torch.rand((rows, k), generator=generator, device=device).argsort(dim=1)
    wanted = wanted.gather(1, shuffle)
    draw = torch.rand((rows, k), generator=generator, device=device) * 100
    wanted = torch.where(draw < p["repeats"], wanted.roll(1, dims=1), wanted)
    draw = torch.rand((rows, k), generator=generator, device=device) * 100
    return torch.where(draw < p["padding"], -1, wanted)


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Random maps and lists; ranks from a few values, so that ties are common."""
    p = case.params
    rows, slots = p["n_rows"], p["slots"]
    scores = torch.rand((rows, max(p["n_blocks"], slots)), generator=generator, device=device)
    resident = scores.argsort(dim=1)[:, :slots].int()
    draw = torch.rand((rows, slots), generator=generator, device=device) * 100
    resident = torch.where((draw < p["empty"]) | (resident >= p["n_blocks"]), -1, resident)
    rank = torch.randint(-2, 3, (rows, slots), generator=generator, device=device).to(_RANKS[p["float_rank"]])
    if p["float_rank"]:
        rank = torch.where(rank == -2, -torch.inf, rank)
    wanted = _wanted(case, generator, resident)
    lanes = -(-rows // p["heads"])
    inputs: dict[str, Any] = {
        "slot_blocks": resident,
        "wanted": wanted,
        "eviction_rank": rank,
        "keep": bool(p["keep"]),
        "heads": p["heads"],
        # The step plan's: rows in another order than their lanes, every fifth one padding.
        "row_heads": torch.randperm(rows, generator=generator, device=device),
        "current_blocks": wanted.amax(dim=1).long(),
        "page_table": torch.randperm(lanes * p["n_blocks"], generator=generator, device=device).view(lanes, -1),
        "use_step": torch.tensor([99], device=device) if p["keep"] else None,
        "token_betas": torch.randn((rows, p["n_blocks"], p["block"]), generator=generator, device=device),
        "slot_betas": torch.full((rows * slots, p["block"]), torch.nan, device=device),
        "count": torch.zeros(1, dtype=torch.int32, device=device),
        "host_rows": torch.full((rows * p["k"],), _POISON, dtype=torch.int64, device=device),
        "slot_rows": torch.full((rows * p["k"],), _POISON, dtype=torch.int64, device=device),
    }
    inputs |= {name: bool(p[name]) for name in ("split", "guess")}
    if p["unknown_pages"]:
        draw = torch.rand(inputs["page_table"].shape, generator=generator, device=device) * 100
        inputs["page_table"][draw < p["unknown_pages"]] = -1
    if rows >= 5:
        inputs["row_heads"][4::5] = -1
    inputs["token"] = p["token"]
    if p["token"]:
        inputs |= _token(case, device, generator)
    return inputs


def _token(case: Case, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Keys side by side and values as the end of a wider projection; poison in the slots."""
    p, n, dim = case.params, case.params["n_rows"] // case.params["heads"], case.params["head_dim"]
    width = p["heads"] * dim
    projection = torch.randn((n, 3 * width), generator=generator, device=device).to(case.torch_dtype)
    shape = (p["n_rows"] * p["slots"], 2, p["block"], dim)
    return {
        "k": projection[:, :width].contiguous().view(n, p["heads"], dim),
        "v": projection[:, 2 * width :].unflatten(1, (p["heads"], dim)),
        "beta": torch.randn((n, p["heads"]), generator=generator, device=device),
        "positions": torch.randint(0, 1 << 20, (n,), generator=generator, device=device),
        "kv_slots": torch.full(shape, torch.nan, dtype=case.torch_dtype, device=device),
    }


def _fast(inputs: dict[str, Any]) -> Tensors:
    from nosa_sys.kernels.set_difference.triton import update_slots

    return update_slots(inputs["slot_blocks"], inputs["wanted"], inputs["eviction_rank"], inputs["keep"])._asdict()


def _reference(inputs: dict[str, Any]) -> Tensors:
    update = reference.update_slots(inputs["slot_blocks"], inputs["wanted"], inputs["eviction_rank"], inputs["keep"])
    return update._asdict()


def _mismatches(a: Tensor, b: Tensor) -> float:
    different = (a != b) & ~(a.isnan() & b.isnan()) if a.is_floating_point() else a != b
    return float(different.sum())


def compare(case: Case, inputs: dict[str, Any], fast: Tensors, expected: Tensors) -> dict[str, tuple[float, float]]:
    """Entries that differ, in every output."""
    return {name: (_mismatches(fast[name], expected[name]), 0.0) for name in expected}


def _plan_launch(inputs: dict[str, Any], state: dict[str, Tensor]) -> dict[str, Tensor]:
    from nosa_sys.kernels.set_difference.plan import plan_slots

    token = None
    if inputs["token"]:
        rows = {name: inputs[name] for name in ("k", "v", "beta", "positions")}
        kept = state["slot_betas"] if inputs["token"] < 3 else None
        token = TokenRows(**rows, slots=state["kv_slots"], slot_betas=kept)
    plan = plan_slots(
        state["slot_blocks"],
        inputs["wanted"],
        state["eviction_rank"],
        inputs["keep"],
        LoadList(state["host_rows"], state["slot_rows"], state["count"]),
        row_heads=inputs["row_heads"],
        current_blocks=inputs["current_blocks"],
        page_table=inputs["page_table"],
        n_kv_heads=inputs["heads"],
        use_step=inputs["use_step"],
        touch="loads" if inputs["guess"] else "wanted",
        token_betas=inputs["token_betas"] if inputs["token"] != 2 else None,
        slot_betas=state["slot_betas"] if inputs["token"] != 2 else None,
        split=inputs["wanted"].shape[1] if inputs["split"] else None,
        count_wasted=inputs["guess"],
        token=token,
    )
    # The list has the name slot_rows among the outputs; every wanted block's row goes by another.
    given = {name: value for name, value in vars(plan).items() if value is not None}
    return {"wanted_rows": given.pop("slot_rows")} | given


_STATE = ("slot_blocks", "eviction_rank", "host_rows", "slot_rows", "count", "slot_betas", "kv_slots")


def _fast_plan(inputs: dict[str, Any]) -> Tensors:
    state = {name: inputs[name].clone() for name in _STATE if name in inputs}
    return state | _plan_launch(inputs, state)


def _launch_plan(inputs: dict[str, Any]) -> None:
    """What a benchmark replays: the lists are overwritten, the map moves on to the wanted blocks once."""
    inputs["count"].zero_()
    _plan_launch(inputs, {name: inputs[name] for name in _STATE if name in inputs})


def _reference_plan(inputs: dict[str, Any]) -> Tensors:
    """The plan row by row in plain Python over the reference's update of each row."""
    state = {name: inputs[name].clone() for name in _STATE if name in inputs}
    wanted, heads, slots = inputs["wanted"], inputs["heads"], inputs["slot_blocks"].shape[1]
    out = {"wanted_slots": torch.full_like(wanted, -1), "n_loads": wanted.new_zeros(wanted.shape[0])}
    out["wanted_rows"] = torch.full(wanted.shape, -1, dtype=torch.int64, device=wanted.device)
    out["current_rows"] = out["wanted_rows"][:, 0].clone()
    if inputs["split"]:
        out |= {"hit_rows": out["wanted_rows"].clone(), "miss_rows": out["wanted_rows"].clone()}
        out["miss_ids"] = torch.full_like(wanted, -1)
    if inputs["guess"]:
        out["n_wasted"] = out["n_loads"].clone()
    pairs: list[tuple[int, int]] = []
    for row, head in enumerate(inputs["row_heads"].tolist()):
        if head < 0:
            continue
        one = slice(head, head + 1)
        rank, old = inputs["eviction_rank"][one], inputs["slot_blocks"][head].tolist()
        update = reference.update_slots(inputs["slot_blocks"][one], wanted[row : row + 1], rank, inputs["keep"])
        state["slot_blocks"][one] = update.slot_blocks
        at = update.wanted_slots[0]
        out["wanted_slots"][row] = at
        is_current = (wanted[row] == inputs["current_blocks"][row]) & (wanted[row] >= 0)
        if is_current.any():
            born = out["current_rows"][row] = int(head * slots + at[is_current][0])
            if inputs["token"]:
                index = divmod(row, heads)
                place = int(inputs["positions"][index[0]]) % state["kv_slots"].shape[2]
                state["kv_slots"][born, :, place] = torch.stack([inputs["k"][index], inputs["v"][index]])
                if inputs["token"] < 3:
                    state["slot_betas"][born, place] = inputs["beta"][index]
        out["wanted_rows"][row] = torch.where(at >= 0, at + head * slots, -1)
        missed = zip(update.load_blocks[0].tolist(), update.load_slots[0].tolist(), strict=True)
        loads = [(b, slot) for b, slot in missed if b >= 0 and b != int(inputs["current_blocks"][row])]
        touched = [slot for _, slot in loads] if inputs["guess"] else at[at >= 0].tolist()
        if inputs["use_step"] is not None:
            state["eviction_rank"][head, touched] = 99
        out["n_loads"][row] = len(loads)
        for entry, (block, slot) in enumerate(loads):
            page = int(inputs["page_table"][head // heads, block])
            pairs.append((page * heads + head % heads if page >= 0 else -1, head * slots + slot))
            if inputs["token"] != 2:
                state["slot_betas"][head * slots + slot] = inputs["token_betas"][head, block]
            if inputs["split"]:
                out["miss_ids"][row, entry], out["miss_rows"][row, entry] = block, head * slots + slot
        if inputs["split"]:
            loaded = torch.isin(wanted[row], wanted.new_tensor([block for block, _ in loads]))
            out["hit_rows"][row] = torch.where(loaded, -1, out["wanted_rows"][row])
        if inputs["guess"]:
            new = update.slot_blocks[0].tolist()
            lost = [slot for slot in range(slots) if old[slot] >= 0 and new[slot] != old[slot]]
            out["n_wasted"][row] = sum(int(rank[0, slot]) % 2 == 0 for slot in lost)
    state["count"][0] = len(pairs)
    for index, (host_row, slot_row) in enumerate(pairs):
        state["host_rows"][index], state["slot_rows"][index] = host_row, slot_row
    return state | out


def compare_plan(
    case: Case, inputs: dict[str, Any], fast: Tensors, expected: Tensors
) -> dict[str, tuple[float, float]]:
    """As ``compare``, the lists as sets of pairs: their order is free. Nothing past the count may be written."""
    lists = ("host_rows", "slot_rows")
    errors = {n: (_mismatches(fast[n], expected[n]), 0.0) for n in expected if n not in lists}
    n = int(expected["count"])
    pairs = [
        sorted(zip(out["host_rows"].tolist()[:n], out["slot_rows"].tolist()[:n], strict=True))
        for out in (fast, expected)
    ]
    errors["pairs"] = (float(sum(a != b for a, b in zip(*pairs, strict=True))), 0.0)
    errors["past_count"] = (float(sum((fast[name][n:] != _POISON).sum() for name in lists)), 0.0)
    return errors


def _bytes(case: Case, inputs: dict[str, Any]) -> int:
    p = case.params
    return p["n_rows"] * (4 * p["k"] * 4 + 2 * p["slots"] * 4 + 4)


def _no_flops(case: Case, inputs: dict[str, Any]) -> int:
    return 0


UPDATE = Operation(
    name="set_difference",
    cases=lambda: check_cases() + bench_cases(),
    make_inputs=make_inputs,
    fast=_fast,
    reference=_reference,
    compare=compare,
    bytes_moved=_bytes,
    flops=_no_flops,
    baselines={"torch": _reference},
)

PLAN = Operation(
    name="slot_plan",
    cases=lambda: check_cases() + plan_cases() + bench_cases(),
    make_inputs=make_inputs,
    fast=_fast_plan,
    reference=_reference_plan,
    compare=compare_plan,
    bytes_moved=_bytes,
    flops=_no_flops,
    launch=_launch_plan,
)

OPERATIONS = (UPDATE, PLAN)
