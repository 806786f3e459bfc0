"""Which fetch path and how many CTAs, as a device's profile found them best."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

import torch

from nosa_sys.engine.cuda.spec import FetchPath
from nosa_sys.kernels.block_fetch.bulk import nvcc_path

# Kernel name of a device -> its profile bundle.
_PROFILES = {"H200": "h200"}
# Without a profile: enough to fill a PCIe 5 link, few beside compute.
_DEFAULT_ALONE, _DEFAULT_BESIDE = FetchPath("uva", 16), FetchPath("uva", 8)


@cache
def fetch_paths(device: torch.device) -> tuple[FetchPath, FetchPath]:
    """Paths for a fetch alone and for one beside compute.

    The bulk path needs nvcc on the machine; without it the SM kernel takes its place.
    """
    if device.type != "cuda":
        return _DEFAULT_ALONE, _DEFAULT_BESIDE
    name = torch.cuda.get_device_name(device)
    profile = next((folder for part, folder in _PROFILES.items() if part in name), None)
    if profile is None:
        return _DEFAULT_ALONE, _DEFAULT_BESIDE
    source = resources.files("nosa_sys.simulator").joinpath("profiles", profile, "choices.json")
    choices = json.loads(source.read_text(encoding="utf-8"))
    alone = FetchPath(**choices["alone"])
    beside = FetchPath(**choices["beside_attention"])
    if beside.path == "bulk" and nvcc_path() is None:
        beside = _DEFAULT_BESIDE
    return alone, beside
