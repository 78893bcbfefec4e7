"""Kernels in CUDA C++: when they are compiled, cached, loaded and launched, with a driver and a compiler that need no
GPU; and what NVRTC makes of them for Hopper, where it is installed."""

import ctypes
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention.backend import NewUnderCaptureError
from attention.capability import Capability
from attention.nvrtc import compiled, nvrtc_of
from attention.ops import cuda_source
from attention.ops.cuda_source import CudaKernel, options_of
from attention.ops.delta_rule import few_rows_cuda
from attention.ops.delta_rule.rounds import delta_rule_rounds
from attention.ops.delta_rule.tables import DeltaHeads, DeltaState
from tests.support.kernels.delta_rule import random_rows, random_weights
from workers.runner.graphs.kernel_compilation import CompileAhead

CPU = torch.device("cpu")
REGISTERS_PER_SM = 1 << 16


@dataclass
class Driver:
    """Stands for libcuda: notes what is loaded and launched."""

    loaded: list[bytes] = field(default_factory=list)
    launched: list[tuple[Any, ...]] = field(default_factory=list)

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:
        self.loaded.append(code)
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = len(self.loaded)
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, addresses: Any, extra: None) -> int:
        launch = config._obj
        pointer = ctypes.cast(addresses[0], ctypes.POINTER(ctypes.c_void_p))[0]
        number = ctypes.cast(addresses[1], ctypes.POINTER(ctypes.c_longlong))[0]
        scale = ctypes.cast(addresses[2], ctypes.POINTER(ctypes.c_float))[0]
        early = launch.num_attributes and (launch.attributes[0].id, launch.attributes[0].value[0])
        sizes = tuple(launch.grid), tuple(launch.block), launch.stream
        self.launched.append((function.value, *sizes, early, pointer, number, scale))
        return 0


@dataclass
class Machine:
    driver: Driver
    compilations: list[Sequence[str]]
    is_capturing: bool = False


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    here = Machine(Driver(), [])

    def compile_source(source: str, options: Sequence[str], library: object) -> bytes:
        here.compilations.append(options)
        return f"{source} {options[-1]}".encode()

    monkeypatch.setattr(cuda_source, "_driver", lambda: here.driver)
    monkeypatch.setattr(cuda_source, "nvrtc", object)
    monkeypatch.setattr(cuda_source, "compiled", compile_source)
    monkeypatch.setattr(cuda_source, "is_capturing", lambda device: here.is_capturing)
    monkeypatch.setattr(cuda_source, "_FUNCTIONS", {})
    monkeypatch.setattr(cuda_source, "_use", lambda device: None)
    monkeypatch.setattr(Capability, "of", staticmethod(lambda device: Capability("cuda", (9, 0))))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return here


@pytest.fixture
def kernel(tmp_path: Path) -> CudaKernel:
    (tmp_path / "double.cu").write_text("source")
    return CudaKernel(tmp_path / "double.cu", "double_it")


X = torch.zeros(4)


def launch(kernel: CudaKernel, width: int, early: bool = False) -> None:
    kernel.launch(CPU, (("WIDTH", width),), (3, 5), 128, early, (X, 1 << 40, 0.5))


def test_a_kernel_is_compiled_and_loaded_once_for_its_constants(machine: Machine, kernel: CudaKernel) -> None:
    for width in (4, 4, 8, 4):
        launch(kernel, width, early=width == 8)
    assert machine.compilations == [options_of((("WIDTH", width),), (9, 0)) for width in (4, 8)]
    assert machine.driver.loaded == [b"source -DWIDTH=4", b"source -DWIDTH=8"]
    sizes = (3, 5, 1), (128, 1, 1), 77
    first, second = ((n, *sizes, early, X.data_ptr(), 1 << 40, 0.5) for n, early in ((1, 0), (2, (6, 1))))
    assert machine.driver.launched == [first, first, second, first]


def test_machine_code_is_kept_until_the_source_changes(
    machine: Machine, kernel: CudaKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in ("source", "source", "other"):
        kernel.path.write_text(source)
        monkeypatch.setattr(cuda_source, "_FUNCTIONS", {})  # another process
        launch(kernel, 4)
    assert len(machine.compilations) == 2
    assert machine.driver.loaded == [b"source -DWIDTH=4", b"source -DWIDTH=4", b"other -DWIDTH=4"]


def test_a_capture_refuses_a_kernel_that_is_not_there(machine: Machine, kernel: CudaKernel) -> None:
    machine.is_capturing = True
    with pytest.raises(NewUnderCaptureError, match="double_it is not compiled") as refused:
        launch(kernel, 4)
    assert not machine.driver.loaded and refused.value.make is not None
    refused.value.make()
    launch(kernel, 4)
    assert len(machine.driver.launched) == 1


def test_a_dry_run_compiles_what_it_meets_and_launches_only_what_is_there(machine: Machine, kernel: CudaKernel) -> None:
    launch(kernel, 2)
    ahead = CompileAhead(2)
    machine.is_capturing = True
    with ahead.dry_run():
        for width in (2, 4, 8, 4):
            launch(kernel, width)
    assert len(machine.driver.launched) == 2, "the kernel that was there"
    ahead.finish()
    assert ahead.num_kernels == 2 and len(machine.driver.loaded) == 3
    launch(kernel, 4)
    assert len(machine.driver.launched) == 3
    ahead.close()


def test_what_does_not_compile_fails_the_start(
    machine: Machine, kernel: CudaKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise RuntimeError("NVRTC: line 3")

    monkeypatch.setattr(cuda_source, "compiled", fail)
    ahead = CompileAhead(1)
    with ahead.dry_run():
        launch(kernel, 4)
    with pytest.raises(RuntimeError, match="line 3"):
        ahead.finish()
    ahead.close()


def test_structures_have_the_sizes_of_the_driver() -> None:
    """CUDA 12 and 13, cuda.h: CUlaunchAttribute and CUlaunchConfig."""
    assert ctypes.sizeof(cuda_source._Attribute) == 72
    assert [getattr(cuda_source._Launch, name).offset for name, _ in cuda_source._Launch._fields_] == [
        0, 12, 24, 32, 40, 48,
    ]  # fmt: skip
    assert ctypes.sizeof(cuda_source._Launch) == 56


HEADS = DeltaHeads(16, 48, 128, 128)


def constants(width: int, path: int, programs: int) -> tuple[tuple[str, int], ...]:
    """Of a round, as the launch has them."""
    kept = DeltaState.zeros(1, HEADS, 1, 1, max(width, path), path, torch.bfloat16, CPU).layer(0)
    rows = random_rows(HEADS, 1, torch.bfloat16, CPU)
    tiles = few_rows_cuda.tiles_of(programs)
    return few_rows_cuda.constants_of(rows, random_weights(HEADS, torch.bfloat16, CPU), kept, width, tiles, True)


def test_rounds_choose_cuda_where_it_compiles() -> None:
    with_compiler = Capability("cuda", (9, 0), frozenset({"triton", "nvrtc"}))
    without = Capability("cuda", (9, 0), frozenset({"triton"}))
    names = [[each.name for each in delta_rule_rounds.serving(here)] for here in (with_compiler, without)]
    assert "cuda, few rows" in names[0] and "cuda, few rows" not in names[1]


@pytest.mark.parametrize("programs", [48, 1536])
@pytest.mark.parametrize("width,path", [(4, 4), (8, 6), (2, 2), (10, 4)])
def test_few_rows_fit_hopper(width: int, path: int, programs: int, tmp_path: Path) -> None:
    """Almost no spills, and nothing is written before the wait."""
    library = nvrtc_of(13) or nvrtc_of(12)
    triton = pytest.importorskip("triton", reason="triton's package has the disassembler")
    if library is None:
        pytest.skip("NVRTC is not installed here")
    source = few_rows_cuda.KERNEL.path.read_text()
    code = tmp_path / "kernel.cubin"
    code.write_bytes(compiled(source, options_of(constants(width, path, programs), (9, 0)), library))

    def dumped(what: str) -> str:
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        return subprocess.run([tool, what, code], capture_output=True, text=True, check=True).stdout

    registers, stack = (int(number) for number in re.findall(r"(?:REG|STACK):(\d+)", dumped("--dump-resource-usage")))
    tiles = few_rows_cuda.tiles_of(programs)
    assert 32 * tiles.warps * tiles.programs * registers <= REGISTERS_PER_SM and stack <= 256
    before, after = dumped("--dump-sass").split("ACQBULK", 1)
    assert "STG" in after and "STG" not in before and "LDG.E.NA.128" in before
