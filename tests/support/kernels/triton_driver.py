"""A driver for Triton that needs no GPU."""

from typing import Any

from triton.backends.compiler import GPUTarget


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
