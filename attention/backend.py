"""The interface of attention backends. `aerie.attention.registry` lists them and what each supports.

A backend prepares a batch once per forward pass (`prepare`) and is then called once per layer (`forward`). Allocations
belong in `prepare`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from aerie.attention.expansion import ExpandedChunks
from aerie.kernels import contracts
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.capability import is_capturing
from aerie.kernels.kv.batches import DecodeBatch, LatentKV, LayerKV, PrefillBatch
from aerie.kernels.kv.mask_bits import MASK_BITS


class Prepared(ABC):
    """One prepared batch. Per layer: `plan` may be called, then the layer's KV is stored, then `forward` is called."""

    def plan(self, q: Tensor, kv: Any, rule: ScoreRule) -> bool:
        """Launch the kernels that compute further inputs of `forward`, if these depend on shapes that only layers know.
        Does nothing if that has been done.

        Called with the arguments of `forward` except sinks, before the layer's KV is stored; reads no values of the
        tensors. The store then lies between these kernels and `forward`, which may be launched early. Without this
        call, `forward` launches them itself, and is not launched early.

        Returns whether the store must be a fence (`aerie.kernels.pdl`) between `forward` and the kernels launched
        here or before the pass. False if an earlier layer's store was one.
        """
        return True  # a fence in every layer is always safe

    @property
    def host_batch(self) -> DecodeBatch | None:
        """The batch, if a CPU's kernels may attend as `forward` does; else None."""
        return None

    @abstractmethod
    def forward(self, q: Tensor, kv: Any, rule: ScoreRule, sinks: Tensor | None = None) -> Tensor:
        """Return attention of q over `kv`, which already has the rows of this pass: [rows, q_heads, head_dim] in q's
        dtype; for latent rows [rows, q_heads, latent].

        q: [rows, q_heads, head_dim].
        kv: the layer's view (`aerie.kernels.kv.batches`), of a kind that the backend supports
            (`aerie.attention.registry`).
        rule: how scores become weights; uses only features in `BackendFacts.scores`.
        sinks: [q_heads] float32, contiguous, if `rule.has_sinks`; else None.
        """


class AttentionBackend(ABC):
    """An attention backend. name: as in the configuration and in `aerie.attention.registry.BACKENDS`."""

    name: ClassVar[str]

    @abstractmethod
    def prepare(self, batch: DecodeBatch | PrefillBatch) -> Prepared:
        """Prepare a batch for `forward`. The batch's tensors are not kept beyond the pass."""

    def expand(self, batch: PrefillBatch, page_size: int) -> ExpandedChunks | None:
        """Return the chunks for layers that expand latent rows to keys and values. None if this backend does not
        support it, or if it would be slower."""
        return None

    def tree_mask_buffer(self, num_requests: int, rows: int, device: torch.device) -> Tensor | None:
        """Return the buffer from which this backend reads the masks of trees of `rows` nodes that the target verifies.
        The caller fills it before `prepare` (`DecodeBatch.mask_words`). None: the backend reads `DecodeBatch.mask`.

        [num_requests, rows, words] uint16, words even. Bit j of word w says whether a row sees column 16 w + j of the
        suffix (`DecodeBatch`), which are the tree's nodes here. The buffer keeps its address, for captured graphs.
        """
        return None


class NewUnderCaptureError(RuntimeError):
    """A step needs a buffer or kernel that does not exist yet and cannot be created during a capture.

    make: creates it, after the capture; None if only an eager run of the step can.
    """

    def __init__(self, message: str, make: Callable[[], object] | None = None) -> None:
        super().__init__(message)
        self.make = make


def assert_not_captured(name: str, device: torch.device, make: Callable[[], object] | None = None) -> None:
    """Raise NewUnderCaptureError during a capture, because memory allocated then belongs to the graph. Backends call it
    before they create what captured graphs use. make: see NewUnderCaptureError."""
    if is_capturing(device):
        message = f"attention backend {name!r}: a new shape under capture; run it once before that"
        raise NewUnderCaptureError(message, make)


def check_inputs(
    q: Tensor, kv: LayerKV | LatentKV, batch: DecodeBatch | PrefillBatch, rule: ScoreRule, sinks: Tensor | None
) -> None:
    """Assert that a layer's inputs are as kernels require, if `contracts.checked`. So the torch backend on a CPU
    refuses what a GPU would refuse. Reads no values."""
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
        assert batch.prefix_len.is_contiguous()
        assert batch.suffix_len <= MASK_BITS or batch.suffix_len == batch.rows
