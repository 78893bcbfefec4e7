"""What an attention backend is. Those that exist, and what each can serve, are in `attention.registry`.

A backend prepares a batch once per forward pass (`prepare`) and is then called once per layer (`forward`). It never
allocates per layer what it could prepare.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from attention.capability import is_capturing
from attention.expansion import ExpandedChunks
from attention.metadata import DecodeBatch, PrefillBatch


class Prepared(ABC):
    """One batch, ready to be attended layer by layer.

    For each layer `plan` may be called, then the layer's KV is stored, then `forward` is called.
    """

    def plan(self, q: Tensor, kv: Any, scale: float) -> bool:
        """Launch what `forward` reads beside q and KV, as far as it hangs on shapes that only layers know.

        Called with the arguments of `forward`, of whose tensors no value is read, before the layer's KV is stored: the
        store then stands between what is launched here and a `forward` that is launched early. Without this call
        `forward` does it, and is not launched early. Does nothing where all is there already.

        Returns whether the store must be a fence (`attention.ops.pdl`), between `forward` and what is launched here
        or before the pass: not where an earlier layer's was one.
        """
        return True  # a fence at every layer is always right

    @abstractmethod
    def forward(self, q: Tensor, kv: Any, scale: float) -> Tensor:
        """Attention of rows q [rows, q_heads, head_dim] over `kv`, whose rows of this pass are already written.

        kv: the layer's view (`attention.views`), of a kind that the backend's row in the registry names. scale: the
        factor on q . k before the softmax. Returns [rows, q_heads, head_dim] in q's dtype; of latent rows [rows,
        q_heads, latent].
        """


class AttentionBackend(ABC):
    """name: as in the configuration and in `attention.registry.BACKENDS`, which holds the facts about it."""

    name: ClassVar[str]

    @abstractmethod
    def prepare(self, batch: DecodeBatch | PrefillBatch) -> Prepared:
        """What `forward` needs of a batch; the batch's tensors are read, not kept longer than the pass."""

    def expand(self, batch: PrefillBatch, page_size: int) -> ExpandedChunks | None:
        """The chunks for layers that make keys and values of latent rows again, where this backend attends to such and
        that pays; None where chunks are attended to as they are prepared."""
        return None

    def verify_buffer(self, num_requests: int, rows: int, device: torch.device) -> Tensor | None:
        """The memory from which this backend reads the masks of trees of `rows` nodes, for whoever reads the trees to
        fill: [num_requests, rows, words] uint16, words even. Bit j of word w of a row says whether it sees suffix
        column 16 w + j. It lives on, where it is. None: `DecodeBatch.mask` is all that it reads."""
        return None


class NewUnderCaptureError(RuntimeError):
    """What a step needs is not there yet and cannot be made under capture.

    make: makes it once the capture has ended; None if only a run of the step does.
    """

    def __init__(self, message: str, make: Callable[[], object] | None = None) -> None:
        super().__init__(message)
        self.make = make


def assert_not_captured(name: str, device: torch.device, make: Callable[[], object] | None = None) -> None:
    """For a backend about to make what captured graphs will hold: raises NewUnderCaptureError under capture, whose
    memory is the graph's own. make: see there."""
    if is_capturing(device):
        message = f"attention backend {name!r}: a new shape under capture; run it once before that"
        raise NewUnderCaptureError(message, make)
