"""The operations that have a fast kernel, by name; their case lists live in kernels/<op>/cases.py."""

from __future__ import annotations

from importlib import import_module

from nosa_sys.errors import ConfigError
from nosa_sys.kernels.case import Operation

OPERATION_MODULES = (
    "eviction_head",
    "compressed_keys",
    "stage1_scores",
    "block_selection",
    "set_difference",
    "block_fetch",
    "sparse_decode_attention",
    "paged_decode_attention",
    "prefill_attention",
    "residual_norm",
    "gated_activation",
    "step_prepare",
)


def load_operation(name: str) -> list[Operation]:
    """Operations that one folder serves (a folder may hold a family, such as fetch and write-back)."""
    if name not in OPERATION_MODULES:
        raise ConfigError(f"unknown operation {name!r}; known: {', '.join(OPERATION_MODULES)}")
    module = import_module(f"nosa_sys.kernels.{name}.cases")
    operations = getattr(module, "OPERATIONS", None)
    return list(operations) if operations is not None else [module.OPERATION]
