"""What every Triton launcher needs: interpreter detection, padded sizes, grids that fill the device.

Imports no triton, so that machines without it can import the dispatchers.
"""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager

import torch
from torch import Tensor

# Used where no device can be asked (interpreter, ahead-of-time compilation): an H200.
_DEFAULT_SMS = 132


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
