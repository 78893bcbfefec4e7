"""NVIDIA's cuobjdump, which triton's package brings."""

import subprocess
from pathlib import Path

import pytest


def dumped(cubin: bytes, folder: Path, what: str = "--dump-sass") -> str:
    """Return what cuobjdump prints of a compiled kernel; skips the test without triton. folder: for the kernel. what:
    cuobjdump's option."""
    triton = pytest.importorskip("triton", reason="triton's package has the disassembler")
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, what, path], capture_output=True, text=True, check=True).stdout
