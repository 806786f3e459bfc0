"""nosa_sys: an engine for NOSA/NOSI sparse attention with KV offload, and a simulator that prices it.

Names are exported lazily (PEP 562): ``import nosa_sys.traces`` loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "SparseConfig": "nosa_sys.sparse_config",
    "ModelShape": "nosa_sys.model_shape",
    "load_model": "nosa_sys.models.load",
    "Engine": "nosa_sys.engine.engine",
    "SamplingParams": "nosa_sys.engine.sampling",
    "Trace": "nosa_sys.traces.reader",
    "simulate": "nosa_sys.simulator.simulate",
    "NosaError": "nosa_sys.errors",
}

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
    from nosa_sys.engine.engine import Engine as Engine
    from nosa_sys.engine.sampling import SamplingParams as SamplingParams
    from nosa_sys.errors import NosaError as NosaError
    from nosa_sys.model_shape import ModelShape as ModelShape
    from nosa_sys.models.load import load_model as load_model
    from nosa_sys.simulator.simulate import simulate as simulate
    from nosa_sys.sparse_config import SparseConfig as SparseConfig
    from nosa_sys.traces.reader import Trace as Trace


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'nosa_sys' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
