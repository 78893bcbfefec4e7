"""Compiles the C++ kernels in `cpp/` for this machine's CPU, once, and loads them. They multiply, norm and attend
float32 rows with float32 sums. A row's result depends neither on the other rows nor on their number, so greedy answers
are equal with and without speculation, alone and in a batch.

Without a C++ compiler (GCC, whose OpenMP runtime torch has loaded already), operations use torch: with 2 threads of an
EPYC Milan and the weights of SmolLM2-135M, one token's products take 29 ms in oneDNN's float32 and 7 in our int8, those
of 16 rows 85 and 36. torch's own int8 and int4 products take 19 and 15 ms for one row but 138 and 110 for 16, and round
inputs to bfloat16; onnxruntime's take 9 and 7, and 58 and 54, and round inputs to 8 bits.
"""

import ctypes
import fcntl
import hashlib
import logging
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from aerie.kernels.capability import Capability

logger = logging.getLogger(__name__)

SOURCES = ("vectors.h", "products.h", "rows.h", "attention.h", "kernels.cpp")
# OpenMP's functions stay undefined: torch's copy of the runtime has them, and two copies would be two pools of threads
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-fno-math-errno", "-ffp-contract=fast")
_COMPILERS = ("g++", "c++")
_LIMIT_S = 300.0  # maximum time of a compilation


def compiles(device: Capability) -> bool:
    """Return whether a device runs the kernels: the CPU, if they could be compiled. The first call compiles them."""
    return device.shares_host_memory and library() is not None


@cache
def library() -> ctypes.CDLL | None:
    """Return the loaded kernels; None, logged once, if they cannot be compiled or loaded."""
    try:
        return ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        logger.warning("CPU kernels are torch's, which are slower: %s; install g++", str(said).strip()[-400:])
        return None


def function(name: str, *arguments: Any) -> Any:
    """Return a function of the kernels, where `compiles`. It returns nothing. arguments: types of its arguments."""
    lib = library()
    assert lib is not None, "asked only where `compiles`"
    symbol = getattr(lib, name)
    symbol.argtypes, symbol.restype = arguments, None
    return symbol


def _compiled() -> Path:
    """Return the shared library, compiled unless the cache has it. Raises OSError, SubprocessError."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise FileNotFoundError("no C++ compiler")
    folder, key = Path(__file__).parent / "cpp", hashlib.sha256()
    for part in (*((folder / name).read_bytes() for name in SOURCES), repr(_FLAGS).encode(), _cpu()):
        key.update(part)
    target = _cache_folder() / f"host-{key.hexdigest()[:20]}.so"
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks start together
        if not target.exists():
            _compile(compiler, folder / "kernels.cpp", target)
    return target


def _compile(compiler: str, source: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        compiled, linked = Path(folder, "kernels.o"), Path(folder, "kernels.so")
        for command in (
            [*_FLAGS, "-c", str(source), "-o", str(compiled)],
            ["-shared", str(compiled), "-o", str(linked)],
        ):
            subprocess.run([compiler, *command], check=True, capture_output=True, text=True, timeout=_LIMIT_S)
        linked.rename(target)


def _cpu() -> bytes:
    """Return what `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return b""
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})).encode()


def _cache_folder() -> Path:
    try:
        folder = Path.home() / ".cache" / "aerie"
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError):  # no home folder, or one that cannot be written
        folder = Path(tempfile.gettempdir())
    return folder
