"""Facts about this machine and program that go into traces and `nosa doctor`; loads no torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from nosa_sys import __version__

_VERSIONED = ("torch", "triton", "numpy", "pyarrow", "tokenizers", "simpy")


def version_of(distribution: str) -> str | None:
    """Installed version of a distribution, None where it is missing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Versions of Python, this package and what its numbers depend on."""
    found = {"python": platform.python_version(), "nosa-sys": __version__}
    return found | {name: version for name in _VERSIONED if (version := version_of(name))}


def cpu_name() -> str:
    """Model name of the CPU as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_gib() -> float | None:
    """Physical memory, None where the system does not say."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def nvidia_link() -> tuple[str, str] | None:
    """(driver version, "PCIe gen G xW") of the first NVIDIA GPU; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = "driver_version,pcie.link.gen.max,pcie.link.width.max"
    lines = _output(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]).splitlines()
    if not lines or lines[0].count(",") != 2:
        return None
    driver, generation, width = (part.strip() for part in lines[0].split(","))
    return driver, f"PCIe gen {generation} x{width}"


def git_revision() -> str:
    """Revision of the checkout that this package runs from, with a mark when files changed; empty elsewhere."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return ""
    return _output(["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]).strip()


def cache_folder() -> Path:
    """Where converted weights are kept: $NOSA_CACHE, else ~/.cache/nosa-sys."""
    return Path(os.environ.get("NOSA_CACHE") or Path.home() / ".cache" / "nosa-sys")


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
