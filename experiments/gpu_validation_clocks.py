"""GPU clocks, power and temperature while something runs, as nvidia-smi says; nothing where there is none."""

from __future__ import annotations

import subprocess
import tempfile
from typing import IO, Any

import numpy as np

FIELDS = ("sm_mhz", "memory_mhz", "power_w", "temperature_c")
_QUERY = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
_PERIOD_MS = 250


class ClockLog:
    """One nvidia-smi in the background; ``since`` gives medians of the samples after a ``place``."""

    def __init__(self, enabled: bool) -> None:
        self._file: IO[str] | None = None
        self._process: subprocess.Popen[Any] | None = None
        if not enabled:
            return
        self._file = tempfile.NamedTemporaryFile("w+", suffix=".csv")  # noqa: SIM115  lives as long as the log
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", f"--loop-ms={_PERIOD_MS}"]
        try:
            self._process = subprocess.Popen(command, stdout=self._file, stderr=subprocess.DEVNULL)
        except OSError:
            self._process = None

    def lines(self) -> list[str]:
        """All samples so far."""
        if self._file is None:
            return []
        with open(self._file.name, encoding="utf-8") as log:
            return [line for line in log.read().split("\n")[:-1] if line.strip()]

    def place(self) -> int:
        return len(self.lines())

    def since(self, place: int) -> dict[str, float]:
        """Medians of each field, and the lowest SM clock; empty without a sample."""
        return summary(self.lines()[place:])

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=5)
        if self._file is not None:
            self._file.close()
            self._file = None


def summary(lines: list[str]) -> dict[str, float]:
    """Medians of samples "sm, memory, power, temperature"; samples with a field that is no number are left out."""
    rows = []
    for line in lines:
        try:
            values = [float(text) for text in line.split(",")]
        except ValueError:
            continue
        if len(values) == len(FIELDS):
            rows.append(values)
    if not rows:
        return {}
    middle = np.median(np.array(rows), axis=0)
    return {**dict(zip(FIELDS, middle.tolist(), strict=True)), "lowest_sm_mhz": min(row[0] for row in rows)}
