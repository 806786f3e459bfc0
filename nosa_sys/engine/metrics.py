"""Run metrics: what was moved, and tokens per second by one stated definition.

TPOT of a sequence = (time of its last token - time of its first) / (tokens - 1); tokens/s per sequence = 1 / TPOT.
So n tokens span n - 1 intervals, and neither prefill nor the cold step, which end with the first token, is inside.
Aggregate tokens/s = tokens of warm steps / wall time of warm steps, a warm step having no cold row. A step's wall time
runs from the end of the step before (of admission and prefill, where a sequence joined), so that what recording and
the caller do between steps counts in both rates. TTFT runs from
``add`` to the first token and contains waiting, prefill and the cold step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SequenceTimes:
    """Clock readings of one sequence, in seconds."""

    prompt_tokens: int
    added_s: float
    token_times_s: list[float] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float | None:
        return (self.token_times_s[0] - self.added_s) * 1e3 if self.token_times_s else None

    @property
    def tpot_ms(self) -> float | None:
        """None with fewer than two tokens."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) * 1e3 if len(times) > 1 else None

    @property
    def tokens_per_s(self) -> float | None:
        tpot_ms = self.tpot_ms
        return 1e3 / tpot_ms if tpot_ms else None


@dataclass
class StepCount:
    """What one decode step did, summed over layers and KV heads. ``cold_*`` is the share of its cold rows."""

    n_rows: int
    n_cold_rows: int
    n_sparse_rows: int
    n_selected: int
    n_misses: int
    cold_selected: int
    cold_misses: int
    n_filled_heads: int


class RunMetrics:
    """Accumulates over a run; ``summary`` gives the figures."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._sequences: dict[int, SequenceTimes] = {}
        self._n_steps = 0
        self._total = StepCount(0, 0, 0, 0, 0, 0, 0, 0)
        self._warm_tokens = 0
        self._warm_s = 0.0
        self._n_warm = 0
        self._cold_s: list[float] = []
        self._prefill_s = 0.0
        self._prefill_tokens = 0
        self._prefill_h2d_bytes = self._prefill_d2h_bytes = 0

    def add(self, sequence: int, prompt_tokens: int, now_s: float) -> None:
        self._sequences[sequence] = SequenceTimes(prompt_tokens, now_s)

    def token(self, sequence: int, now_s: float) -> None:
        self._sequences[sequence].token_times_s.append(now_s)

    def prefill(self, n_tokens: int, h2d_bytes: int, d2h_bytes: int, time_s: float) -> None:
        self._prefill_tokens += n_tokens
        self._prefill_h2d_bytes += h2d_bytes
        self._prefill_d2h_bytes += d2h_bytes
        self._prefill_s += time_s

    def step(self, count: StepCount, time_s: float) -> None:
        self._n_steps += 1
        for name, value in vars(count).items():
            setattr(self._total, name, getattr(self._total, name) + value)
        if count.n_cold_rows:
            self._cold_s.append(time_s)
        else:
            self._n_warm += 1
            self._warm_tokens += count.n_rows
            self._warm_s += time_s

    def summary(self) -> dict[str, Any]:
        """All figures; None where nothing was measured. Byte counts are exact."""
        total, size = self._total, self._block_bytes
        warm_selected, warm_misses = total.n_selected - total.cold_selected, total.n_misses - total.cold_misses
        rates = [s.tokens_per_s for s in self._sequences.values() if s.tokens_per_s is not None]
        return {
            "n_steps": self._n_steps,
            "n_rows": total.n_rows,
            "new_tokens": total.n_rows,
            "sparse_step_share": _ratio(total.n_sparse_rows, total.n_rows),
            "blocks_loaded": total.n_misses,
            "blocks_loaded_warm": warm_misses,
            "blocks_loaded_cold": total.cold_misses,
            "hit_rate": None if not warm_selected else 1.0 - warm_misses / warm_selected,
            "h2d_bytes": total.n_misses * size,
            "h2d_bytes_cold": total.cold_misses * size,
            "d2h_bytes": total.n_filled_heads * size,
            "prefill_h2d_bytes": self._prefill_h2d_bytes,
            "prefill_d2h_bytes": self._prefill_d2h_bytes,
            "prefill_tokens": self._prefill_tokens,
            "prefill_s": self._prefill_s,
            "prefill_tokens_per_s": _ratio(self._prefill_tokens, self._prefill_s),
            "cold_step_ms": _ratio(sum(self._cold_s) * 1e3, len(self._cold_s)),
            "warm_step_ms": _ratio(self._warm_s * 1e3, self._n_warm),
            "tokens_per_s_per_sequence": _ratio(sum(rates), len(rates)),
            "tokens_per_s": _ratio(self._warm_tokens, self._warm_s),
            "sequences": [
                {
                    "sequence": sequence,
                    "prompt_tokens": times.prompt_tokens,
                    "new_tokens": len(times.token_times_s),
                    "ttft_ms": times.ttft_ms,
                    "tpot_ms": times.tpot_ms,
                    "tokens_per_s": times.tokens_per_s,
                }
                for sequence, times in self._sequences.items()
            ],
        }


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
