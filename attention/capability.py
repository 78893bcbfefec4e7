"""What a device, and what is installed beside us, can run: asked once, and the only place that asks.

Read by the tables of operations (`attention.ops.operation`), by the attention backends' limits and by the plan.
"""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

_LIBRARIES = ("triton", "flashinfer")


@dataclass(frozen=True)
class Capability:
    """type: "cpu" or "cuda". compute: the GPU's compute capability (major, minor); None on a CPU, and where it is not
    known yet, as for a plan that is made on another machine. libraries: names of those installed here."""

    type: str
    compute: tuple[int, int] | None = None
    libraries: frozenset[str] = frozenset()

    @staticmethod
    def of(device: torch.device) -> "Capability":
        """Of a device that this process sees."""
        return _of(device.type, device.index)

    @property
    def is_gpu(self) -> bool:
        return self.type == "cuda"

    @property
    def supports_pdl(self) -> bool:
        """Kernels can be launched before their predecessor has ended (`attention.ops.pdl`)."""
        return self.reaches((9, 0))

    def reaches(self, compute: tuple[int, int]) -> bool:
        """Whether this is a GPU of that compute capability or a later one."""
        return self.compute is not None and self.compute >= compute


@cache
def _of(kind: str, index: int | None) -> Capability:
    compute = torch.cuda.get_device_capability(index) if kind == "cuda" else None
    return Capability(kind, compute, frozenset(name for name in _LIBRARIES if find_spec(name) is not None))
