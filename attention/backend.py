"""What an attention backend is, and the table of those that exist.

A backend prepares a batch once per forward pass (`prepare`) and is then called once per layer (`forward`). It never
allocates per layer what it could prepare, and states whether it must know lengths on the host.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from attention.kv_pool import LayerKV
from attention.metadata import ChunkBatch, Mode, TailBatch


class Prepared(ABC):
    """One batch, ready to be attended layer by layer."""

    @abstractmethod
    def forward(self, q: Tensor, kv: LayerKV, scale: float) -> Tensor:
        """Attention of rows q [rows, q_heads, head_dim] over `kv`, whose rows of this pass are already written.

        scale: the factor on q . k before the softmax. Returns [rows, q_heads, head_dim] in q's dtype.
        """


class AttentionBackend(ABC):
    """name: as in the configuration. modes: what it can do. needs_cpu_seq_lens: whether `prepare` reads lengths on
    the host, which costs a device-to-host copy per round on a GPU."""

    name: ClassVar[str]
    modes: ClassVar[frozenset[Mode]]
    needs_cpu_seq_lens: ClassVar[bool]

    @abstractmethod
    def prepare(self, batch: TailBatch | ChunkBatch) -> Prepared:
        """What `forward` needs of a batch; the batch's tensors are read, not kept longer than the pass."""


def _torch() -> AttentionBackend:
    from attention.torch_backend import TorchBackend

    return TorchBackend()


def _triton() -> AttentionBackend:
    from attention.triton_backend import TritonBackend

    return TritonBackend()


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"torch": _torch, "triton": _triton}


def build_backend(name: str, mode: Mode) -> AttentionBackend:
    """The backend `name`; raises ValueError with the ones that exist if there is none or it cannot do `mode`."""
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r}: does not exist; choose one of {', '.join(sorted(BACKENDS))}")
    backend = BACKENDS[name]()
    if mode not in backend.modes:
        raise ValueError(f"attention backend {name!r}: cannot do {mode.value}; it does "
                         f"{', '.join(sorted(m.value for m in backend.modes))}")
    return backend
