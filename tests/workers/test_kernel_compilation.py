"""Kernels are compiled ahead of their launch, by threads, as the launch would have compiled them: with Triton's own
compiler for Hopper and a driver that needs no GPU."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from attention.backend import NewUnderCaptureError  # noqa: E402
from workers.runner.graphs.kernel_compilation import CompileAhead, nothing_new  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


class Hopper:
    """Stands for Triton's driver of an H200: notes which kernels are loaded and launched."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.launched: list[tuple[int, ...]] = []
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[object, ...]:
        assert binary, "the kernel was not assembled"
        self.loaded.append(name)
        return object(), object(), 32, 0, 1024

    def launcher_cls(self, source: object, metadata: object) -> Any:
        return lambda *arguments: self.launched.append(arguments[:3])


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hopper]:
    hopper = Hopper()
    monkeypatch.setattr(triton.runtime.driver, "_active", hopper)
    yield hopper


def kernel_of(driver: Hopper) -> Any:
    @triton.jit
    def double(x_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        columns = tl.arange(0, BLOCK)
        tl.store(out_ptr + columns, 2 * tl.load(x_ptr + columns))

    return double


def launch(kernel: Any, block: int) -> None:
    x = torch.zeros(block)
    kernel[(3,)](x, x, BLOCK=block)


def test_a_rehearsal_compiles_what_it_meets_and_launches_only_what_is_there(driver: Hopper) -> None:
    kernel, ahead = kernel_of(driver), CompileAhead(2)
    launch(kernel, 16)
    with ahead.rehearsing():
        for block in (16, 32, 64, 32):
            launch(kernel, block)
    assert driver.launched == [(3, 1, 1)] * 2, "those of 16, which were compiled before"
    ahead.finish()
    ahead.finish()
    assert ahead.num_kernels == 2 and driver.loaded == ["double"] * 3
    with nothing_new():
        for block in (16, 32, 64):
            launch(kernel, block)
    assert len(driver.launched) == 5 and len(driver.loaded) == 3
    ahead.close()


def test_under_capture_a_new_kernel_is_refused_and_compiled_later(driver: Hopper) -> None:
    kernel = kernel_of(driver)
    with nothing_new(), pytest.raises(NewUnderCaptureError, match="not compiled yet"):
        launch(kernel, 16)
    assert not driver.loaded
    launch(kernel, 16)
    assert driver.launched == [(3, 1, 1)]


def test_what_does_not_compile_fails_the_start(driver: Hopper) -> None:
    @triton.jit
    def wrong(x_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.store(x_ptr + tl.arange(0, BLOCK), no_such_name)  # type: ignore[name-defined]  # noqa: F821

    ahead = CompileAhead(1)
    with ahead.rehearsing():
        wrong[(1,)](torch.zeros(16), BLOCK=16)
    with pytest.raises(triton.CompilationError, match="no_such_name"):
        ahead.finish()
    ahead.close()
