"""Which attention backend serves which mode of the draft, as configured. Used by `speculative.build`; the target's are
chosen in `workers.runner.backends`."""

from attention.config import DraftAttention
from attention.metadata import Mode
from attention.registry import Choice, choose_backends
from workers.runner.backends import Backends, ModelShape


def draft_backends(names: DraftAttention, shape: ModelShape, tree: bool) -> Backends:
    """tree: whether drafting branches. Raises ValueError as `choose_backends` does."""
    return choose_backends(
        [
            Choice("draft_attention.prefill", names.prefill, shape.use(Mode.PREFILL)),
            Choice("draft_attention.extend", names.extend, shape.use(Mode.DRAFT_EXTEND)),
            Choice("draft_attention.decode", names.decode, shape.use(Mode.DRAFT_DECODE, tree)),
        ]
    )
