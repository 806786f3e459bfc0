"""What the demo says in the terminal when it is done."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from nosa_sys.cli import console as out
from nosa_sys.cli.capture import summary_table


def print_summary(console: Console, document: dict[str, Any]) -> None:
    """Capture, theorem, replays, sweep and times, in that order."""
    console.print(summary_table(document["capture"]))
    check = document["check"]
    verdict = "holds at every row" if check["ok"] else f"is broken at {check['n_problems']} places"
    console.print(f"Locality theorem and counting rules: {verdict} ({check['n_rows']:,} rows)\n")
    replays = document["replays"]
    spare = [r for r in replays if r["name"].startswith("slots-")]
    ratios = sorted({r["slots_over_k"] for r in spare})
    policies = ("exact", "lru", "beta", "belady")
    found = {(r["policy"], r["slots_over_k"]): r["misses_per_head_step"] for r in spare}
    console.print(
        out.table(
            "Misses per head and step against slots (replayed from the measured selections)",
            ("policy", *(f"{ratio:g} k" for ratio in ratios)),
            [(policy, *(found.get((policy, ratio)) for ratio in ratios)) for policy in policies],
        )
    )
    console.print(
        out.table(
            "Other budgets and methods at slots = k (re-selected from the measured scores)",
            ("budgets", "k", "select", "block", "gamma", "floor", "misses", "KiB per step"),
            [
                (
                    r["name"].removeprefix("budgets-"),
                    r["sparse"]["topk"],
                    r["sparse"]["select_blocks"],
                    r["sparse"]["block_size"],
                    r["gamma_macro"],
                    r["guaranteed_gamma"],
                    r["misses_per_head_step"],
                    r["h2d_bytes_per_step"] / 1024 if r["h2d_bytes_per_step"] is not None else None,
                )
                for r in replays
                if r["name"].startswith("budgets-") or r["name"] == "slots-1.00-exact"
            ],
        )
    )
    for skipped in document["replays_skipped"]:
        console.print(f"not replayed: {skipped}")
    sweep = document["sweep"]
    best = sweep["best"]
    console.print(f"Sweep: {sweep['n_configurations']} configurations, status {', '.join(sweep['status'])}")
    if best is not None:
        console.print(
            f"  fastest that fits: {best['tokens_per_s']:,.0f} tokens/s, {best['model_shape']}, batch {best['batch']}, "
            f"{best['slots']} slots, {best['h2d_gbps']:g} GB/s, limited by {best['limited_by']}"
        )
    seconds = document["seconds"]
    console.print(f"\nReport: {document['report']} ({document['figures']} figures)")
    console.print("Time: " + ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items()), style="dim")
