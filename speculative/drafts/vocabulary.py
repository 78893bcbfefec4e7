"""Maps a draft's vocabulary to the target's, in the formats that checkpoints publish."""

import torch
from torch import Tensor

from speculative.drafts.eagle3_checkpoint import target_ids
from speculative.drafts.method import DraftMethod


def take_target_ids(tensors: dict[str, Tensor], method: DraftMethod) -> Tensor | None:
    """Return the target id of each draft id, [draft vocabulary] int64; None if equal. Removes `d2t` and `t2d` from
    `tensors`.

    d2t: [draft vocabulary] integers to add to draft ids. Some checkpoints have the target ids themselves here, which is
        detected by t2d.
    t2d: [target vocabulary] bool, whether the draft has this token. It has no order, so it cannot replace a missing
    d2t. Raises ValueError if the vocabularies differ and there is no map, or one for another target.
    """
    source, vocab_size, target_size = f"draft {method.path}", method.vocab_size, method.model.vocab_size
    given, members = tensors.pop("d2t", None), _members(tensors.pop("t2d", None), vocab_size)
    if given is None:
        if vocab_size == target_size:
            return None
        raise ValueError(
            f"{source}: has its own vocabulary of {vocab_size} but no d2t, so nothing says which of the target's "
            "tokens these are; use a checkpoint that has d2t"
        )
    if given.shape != (vocab_size,):
        raise ValueError(f"{source}: d2t has shape {tuple(given.shape)}, draft_vocab_size={vocab_size}")
    ids = target_ids(given)
    if members is not None and torch.equal(given.long().sort().values, members):
        ids = given.long()
    if int(ids.min()) < 0 or int(ids.max()) >= target_size:
        raise ValueError(
            f"{source}: d2t points outside the target's vocabulary of {target_size}; it belongs to another target"
        )
    if members is not None and not torch.equal(ids.sort().values, members):
        raise ValueError(
            f"{source}: d2t and t2d name different tokens of the target, whether d2t has offsets or ids; use a "
            "checkpoint whose d2t and t2d are of one vocabulary"
        )
    same = vocab_size == target_size and torch.equal(ids, torch.arange(vocab_size))
    return None if same else ids


def _members(mask: Tensor | None, vocab_size: int) -> Tensor | None:
    """Return the target ids set in t2d, ascending, [draft vocabulary] int64. None if their number is wrong: heads with
    the target's vocabulary have a t2d of all false."""
    if mask is None or mask.dtype != torch.bool:
        return None
    ids = mask.nonzero().flatten()
    return ids if ids.shape[0] == vocab_size else None
