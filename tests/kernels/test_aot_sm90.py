"""Every Triton kernel compiles for sm_90 at every type it serves, within the registers and shared memory of an SM."""

import re
import subprocess
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("triton")

from nosa_sys.kernels.aot import SHARED_MEMORY_LIMIT_BYTES, AotSpec, compile_for_sm90
from nosa_sys.kernels.registry import OPERATION_MODULES

# Triton 3.7 spills in this one, 3.6 does not. fp32 is there for checks; the types that decode for speed stay at 0.
SPILLS_AT_MOST = {"attend-pages-fp32-128-16": 512}
# No spill: the words that the accurate cosine and sine index into, for angles past 1e5.
SPILLS_AT_MOST |= {"prepare-2-64-64": 32, "prepare-3-48-40": 32}


def _specs() -> list[tuple[str, AotSpec]]:
    found = []
    for operation in OPERATION_MODULES:
        name = f"nosa_sys.kernels.{operation}.triton"
        if find_spec(name) is not None:
            found += [(operation, spec) for spec in import_module(name).AOT_SPECS]
    return found


def _spilled_bytes(cubin: bytes) -> int:
    """Local memory of a kernel, as the disassembler that ships with Triton reports it."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("no cuobjdump beside triton")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = re.search(r"STACK:(\d+) .*LOCAL:(\d+)", text)
    assert match, text
    return max(int(match[1]), int(match[2]))


@pytest.mark.parametrize(("operation", "spec"), [pytest.param(o, s, id=f"{o}-{s.name}") for o, s in _specs()])
def test_kernel_compiles_for_sm90_without_spills(operation: str, spec: AotSpec) -> None:
    compiled = compile_for_sm90(spec)
    assert compiled.metadata.shared <= SHARED_MEMORY_LIMIT_BYTES
    assert _spilled_bytes(compiled.asm["cubin"]) <= SPILLS_AT_MOST.get(spec.name, 0)


def test_case_25_a_bounded_exponent_lets_a_nan_through() -> None:
    """The PTX of the plain DMA head: min.f32 would make the largest bias of a NaN, which the interpreter's does not."""
    from nosa_sys.kernels.eviction_head.triton import AOT_SPECS

    exponential = [spec for spec in AOT_SPECS if spec.constexprs["HEAD"] == 2]
    assert len(exponential) == 2
    for spec in exponential:
        assert set(re.findall(r"\bmin[.\w]*", compile_for_sm90(spec).asm["ptx"])) == {"min.NaN.f32"}
