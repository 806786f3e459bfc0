"""What every Triton launcher needs: interpreter detection, padded sizes, grids that fill the device.

Imports no triton, so that machines without it can import the dispatchers.
"""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from importlib.util import find_spec

import torch
from torch import Tensor

from nosa_sys.errors import ConfigError

# Used where no device can be asked (interpreter, ahead-of-time compilation): an H200.
_DEFAULT_SMS = 132
NO_TRITON = (
    "triton is not installed; pip install -e '.[gpu]' in the checkout brings it (Linux, x86-64), so does make test"
)


def has_triton() -> bool:
    """Whether Triton is installed, found without importing it."""
    return find_spec("triton") is not None


def require_triton() -> None:
    """ConfigError naming the installation where there is no Triton."""
    if not has_triton():
        raise ConfigError(NO_TRITON)


def choose_interpreter() -> bool:
    """Run Triton kernels of this process in the CPU interpreter; call it before any of them is imported. False, and the
    reference alone is left, where Triton is not installed."""
    os.environ["TRITON_INTERPRET"] = "1" if has_triton() else "0"
    return interpreting()


def interpreting() -> bool:
    """Whether Triton kernels run in its CPU interpreter (decided by the environment before they are imported)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(*tensors: Tensor) -> bool:
    """Whether the fast path serves these tensors: all on a CUDA device, none of them float64."""
    return all(t.is_cuda and t.dtype != torch.float64 for t in tensors)


def n_sms(device: torch.device) -> int:
    """Streaming multiprocessors of the device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _DEFAULT_SMS


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current: Triton launches on the current device and stream."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
