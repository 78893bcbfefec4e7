"""The interface of attention backends. `attention.registry` lists them and what each supports.

A backend prepares a batch once per forward pass (`prepare`) and is then called once per layer (`forward`). It allocates
nothing per layer that it could prepare.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from attention.capability import is_capturing
from attention.expansion import ExpandedChunks
from attention.metadata import DecodeBatch, PrefillBatch
from attention.ops import contracts
from attention.scores import ScoreRule
from attention.views import LatentKV, LayerKV


class Prepared(ABC):
    """One prepared batch. Per layer: `plan` may be called, then the layer's KV is stored, then `forward` is called."""

    def plan(self, q: Tensor, kv: Any, rule: ScoreRule) -> bool:
        """Launch what `forward` reads beside q and KV, if it depends on shapes that only layers know. Does nothing if
        it exists already.

        Called with the arguments of `forward` but for sinks, before the layer's KV is stored; reads no values of the
        tensors. The store then separates what is launched here from a `forward` that is launched early. Without this
        call `forward` does it, and is not launched early.

        Returns whether the store must be a fence (`attention.ops.pdl`) between `forward` and what is launched here or
        before the pass; not if an earlier layer's store was one.
        """
        return True  # a fence in every layer is always safe

    @abstractmethod
    def forward(self, q: Tensor, kv: Any, rule: ScoreRule, sinks: Tensor | None = None) -> Tensor:
        """Return attention of q over `kv`, which already has the rows of this pass: [rows, q_heads, head_dim] in q's
        dtype; for latent rows [rows, q_heads, latent].

        q: [rows, q_heads, head_dim].
        kv: the layer's view (`attention.views`), of a kind that the backend's row in the registry names.
        rule: how scores become weights; of what `BackendFacts.scores` says that the backend serves.
        sinks: [q_heads] float32, contiguous, if `rule.has_sinks`; else None.
        """


class AttentionBackend(ABC):
    """name: as in the configuration and in `attention.registry.BACKENDS`."""

    name: ClassVar[str]

    @abstractmethod
    def prepare(self, batch: DecodeBatch | PrefillBatch) -> Prepared:
        """Prepare a batch for `forward`. The batch's tensors are not kept beyond the pass."""

    def expand(self, batch: PrefillBatch, page_size: int) -> ExpandedChunks | None:
        """Return the chunks for layers that expand latent rows to keys and values, if this backend supports it and it
        pays; else None."""
        return None

    def verify_buffer(self, num_requests: int, rows: int, device: torch.device) -> Tensor | None:
        """Return the memory from which this backend reads masks of trees of `rows` nodes, for the caller to fill; None:
        it reads `DecodeBatch.mask`.

        [num_requests, rows, words] uint16, words even. Bit j of word w says whether a row sees suffix column 16 w + j.
        It stays valid, at the same address.
        """
        return None


class NewUnderCaptureError(RuntimeError):
    """A step needs something that does not exist yet and cannot be created during a capture.

    make: creates it after the capture; None if only a run of the step does.
    """

    def __init__(self, message: str, make: Callable[[], object] | None = None) -> None:
        super().__init__(message)
        self.make = make


def assert_not_captured(name: str, device: torch.device, make: Callable[[], object] | None = None) -> None:
    """Raise NewUnderCaptureError during a capture, whose memory belongs to the graph. For backends about to create what
    captured graphs will use. make: see there."""
    if is_capturing(device):
        message = f"attention backend {name!r}: a new shape under capture; run it once before that"
        raise NewUnderCaptureError(message, make)


def check_inputs(
    q: Tensor, kv: LayerKV | LatentKV, batch: DecodeBatch | PrefillBatch, rule: ScoreRule, sinks: Tensor | None
) -> None:
    """Assert what kernels demand of a layer's inputs, so that the torch backend on a CPU refuses what a GPU would
    refuse, if `contracts.checked`. Reads no values."""
    if not contracts.checked:
        return
    assert q.dim() == 3 and q.stride(2) == 1 and q.shape[0] == batch.num_rows and rule.scale > 0
    if isinstance(kv, LatentKV):
        assert kv.rows.is_contiguous() and q.shape[2] == kv.rows.shape[2]
    else:
        assert kv.k.is_contiguous() and kv.v.is_contiguous() and q.shape[1] % kv.k.shape[2] == 0
    assert rule.has_sinks == (sinks is not None) and (sinks is None or sinks.is_contiguous())
    assert batch.page_table.stride(1) == 1 and batch.page_table.dtype == torch.int32
    if isinstance(batch, DecodeBatch):
        assert batch.prefix_len.is_contiguous() and batch.suffix_len <= 63
