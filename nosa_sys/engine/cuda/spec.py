"""What is fixed while a captured step lives: the engine's parts, sizes rounded up, and what the step leaves out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nosa_sys.engine.injection import Injection
from nosa_sys.engine.memory import Memory
from nosa_sys.engine.policies import Policy
from nosa_sys.engine.record_level import RECORD_NOTHING
from nosa_sys.models.llama import LlamaModel


@dataclass(frozen=True)
class FetchPath:
    """How missed blocks are copied: ``path`` uva (SM kernel) or bulk (copy engine of the SMs), and by how many CTAs."""

    path: Literal["uva", "bulk"]
    n_ctas: int


@dataclass(frozen=True)
class StepOptions:
    """``alone`` and ``beside``: the fetch path when nothing runs beside it, and beside compute. ``skip_fetch`` leaves
    copies of missed blocks out (compute alone), ``fetch_only`` leaves attention and matrices out: both for
    measurements, their tokens mean nothing. ``timed`` writes clock marks at phase borders. ``n_prefetch`` blocks a head
    are speculated on by schedule prefetch."""

    alone: FetchPath
    beside: FetchPath
    record: int = RECORD_NOTHING
    skip_fetch: bool = False
    fetch_only: bool = False
    timed: bool = False
    n_prefetch: int = 0


@dataclass(frozen=True)
class StepSpec:
    """One capture's constants. ``n_lanes`` rows; ``n_blocks`` and ``n_windows`` bound every row's context;
    ``sampled``: some row draws its token, else all take the best. ``splits_attention``: plans tell hits from misses."""

    model: LlamaModel
    memory: Memory
    policy: Policy
    options: StepOptions
    injection: Injection | None
    n_lanes: int
    n_blocks: int
    n_windows: int
    sampled: bool
    splits_attention: bool
