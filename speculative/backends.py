"""Chooses the draft's attention backend per mode. Used by `speculative.build`; `workers.runner.backends` chooses the
target's."""

from attention.config import DraftAttention
from attention.metadata import Mode
from attention.registry import Choice, choose_backends
from workers.runner.backends import Backends, ModelShape


def draft_choices(names: DraftAttention, shape: ModelShape, tree: bool, window: int | None = None) -> list[Choice]:
    """Return the configured backends of the draft. tree: whether drafting branches. window: see `SpeculativeConfig`."""
    return [
        Choice("draft_attention.prefill", names.prefill, shape.use(Mode.PREFILL, window=window)),
        Choice("draft_attention.extend", names.extend, shape.use(Mode.DRAFT_EXTEND, window=window)),
        Choice("draft_attention.decode", names.decode, shape.use(Mode.DRAFT_DECODE, tree, window)),
    ]


def draft_backends(names: DraftAttention, shape: ModelShape, tree: bool, window: int | None = None) -> Backends:
    """Return the backends of `draft_choices`. Raises ValueError as `choose_backends` does."""
    return choose_backends(draft_choices(names, shape, tree, window))
