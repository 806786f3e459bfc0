"""HostStorage: KV blocks kept on the host in another format than the device's, a what-if with its assumed cost.

No engine was run so: every result is a projection. Blocks are converted by a kernel of its own on the GPU, on arrival
to the device's format and before a filled block is written back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nosa_sys.errors import ConfigError
from nosa_sys.kv_format import KvFormat
from nosa_sys.simulator.hardware import HardwareProfile
from nosa_sys.simulator.step_times import Conversion, Floats

_MOST = 1e12


@dataclass(frozen=True)
class HostStorage:
    """``dequant_gbps``: rate of the bytes read plus written by a conversion, GB/s (None: the profile's ``hbm_gbps``).

    ``dequant_fixed_us``: its launch, in each layer that converts something (None: the profile's ``select_fixed_us``,
    the append, a short kernel over the rows; with engine terms ``append_us``).
    """

    format: KvFormat
    dequant_gbps: float | None = None
    dequant_fixed_us: float | None = None

    def __post_init__(self) -> None:
        for name, lowest in (("dequant_gbps", 1e-3), ("dequant_fixed_us", 0.0)):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= _MOST:
                raise ConfigError(f"{name}={value!r} must be a finite number in [{lowest:g}, {_MOST:g}]")

    def speed(self, hardware: HardwareProfile) -> tuple[float, float]:
        """(GB/s, us a launch) on a machine."""
        short = hardware.select_fixed_us if hardware.engine is None else hardware.engine.append_us
        return (
            hardware.hbm_gbps if self.dequant_gbps is None else self.dequant_gbps,
            short if self.dequant_fixed_us is None else self.dequant_fixed_us,
        )

    def conversion(
        self, arrived: np.ndarray, written: np.ndarray, bytes_a_block: int, hardware: HardwareProfile
    ) -> Conversion:
        """Times for ``arrived`` and ``written`` blocks, [step, layer]; ``bytes_a_block``: read plus written for one."""
        gbps, fixed_us = self.speed(hardware)

        def times(blocks: np.ndarray) -> Floats:
            return np.where(blocks > 0, fixed_us + blocks * float(bytes_a_block) / (gbps * 1e3), 0.0)

        return Conversion(times(arrived), times(written))

    def rule(self, host_block_bytes: int, device_block_bytes: int, hardware: HardwareProfile) -> str:
        """What is assumed, with its numbers."""
        gbps, fixed_us = self.speed(hardware)
        given = "given" if self.dequant_gbps is not None else "the profile's hbm_gbps"
        launch = "given" if self.dequant_fixed_us is not None else "as the append's launch"
        return (
            f"assumed, not measured: host blocks as {self.format.describe()}: {host_block_bytes} bytes for "
            f"{device_block_bytes} on the device; converting takes {fixed_us:.3g} us a layer ({launch}) and the bytes "
            f"read plus written at {gbps:.4g} GB/s ({given}), in attention_us on arrival and in select_us before a "
            "write-back; what it does to accuracy or to the selection is not modelled"
        )


def host_storage(
    host_kv_dtype: str | None, dequant_gbps: float | None = None, dequant_fixed_us: float | None = None
) -> HostStorage | None:
    """From what a user gave; None for "as it is". ConfigError for conversion costs without a format."""
    if host_kv_dtype is None:
        if dequant_gbps is not None or dequant_fixed_us is not None:
            raise ConfigError("dequant_gbps and dequant_fixed_us need host_kv_dtype (--host-kv-dtype), as int4")
        return None
    return HostStorage(KvFormat.parse(host_kv_dtype), dequant_gbps, dequant_fixed_us)
