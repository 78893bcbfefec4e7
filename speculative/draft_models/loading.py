"""From a published draft checkpoint to a head on this rank."""

from collections.abc import Iterator

import torch
from torch import Tensor

from speculative.config import SpeculativeConfig
from speculative.draft_models.config import DraftConfig
from speculative.draft_models.eagle import HEADS, DraftHead
from workers.config import ModelSource
from workers.distributed.tp_group import TPGroup
from workers.layers.linear_method import pack_all
from workers.models.decoder import Decoder
from workers.models.weights import checkpoint_tensors, fill_dummy, load_parameters

_ALIASES = {"layers.0.": "midlayer."}  # some published EAGLE-3 heads name their layer so


def load_draft(
    speculative: SpeculativeConfig,
    config: DraftConfig,
    source: ModelSource,
    target: Decoder,
    group: TPGroup,
    device: torch.device,
    max_position: int,
) -> DraftHead:
    """This rank's part of the head. Embedding (and for EAGLE the vocabulary head) that the draft's file lacks are the
    target's: the same modules where both are cut alike, copies from the target's checkpoint otherwise.

    Raises ValueError naming what the checkpoint lacks, or holds and the head does not know.
    """
    with torch.device("meta"):
        head = HEADS[config.method](config, group, max_position, device)
    head.to(next(target.parameters()).dtype).to_empty(device=device)
    if source.load_format == "dummy":
        fill_dummy(head, source.seed + 1)
        head.target_ids = _dummy_target_ids(config, device)
        pack_all(head)
        return head.eval()
    tensors = dict(_named(checkpoint_tensors(speculative.path), config))
    head.target_ids = _target_ids(tensors, config, f"draft {speculative.path}", device)
    shared = _share_with_target(head, tensors, config, source, target)
    load_parameters(head, iter(tensors.items()), f"draft {speculative.path}", optional=shared)
    pack_all(head)
    return head.eval()


def _named(tensors: Iterator[tuple[str, Tensor]], config: DraftConfig) -> Iterator[tuple[str, Tensor]]:
    """Tensors under the names that our heads use."""
    for name, tensor in tensors:
        name = name.removeprefix("model.")
        if config.method == "eagle3":
            for alias, ours in _ALIASES.items():
                name = name.replace(alias, ours, 1) if name.startswith(alias) else name
        if name != "t2d" and "rotary_emb" not in name:
            yield name, tensor


def _target_ids(tensors: dict[str, Tensor], config: DraftConfig, source: str, device: torch.device) -> Tensor | None:
    """[draft vocab] int64 from the offsets d2t (target id = draft id + d2t); removes d2t from `tensors`."""
    offsets = tensors.pop("d2t", None)
    if config.vocab_size == config.model.vocab_size and offsets is None:
        return None
    if offsets is None:
        raise ValueError(
            f"{source}: has its own vocabulary of {config.vocab_size} but no d2t, so its tokens cannot be "
            "told; use a head that carries d2t"
        )
    if offsets.shape != (config.vocab_size,):
        raise ValueError(f"{source}: d2t has shape {tuple(offsets.shape)}, draft_vocab_size={config.vocab_size}")
    ids = torch.arange(config.vocab_size) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= config.model.vocab_size:
        raise ValueError(
            f"{source}: d2t points outside the target's vocabulary of {config.model.vocab_size}; it "
            "belongs to another target"
        )
    return ids.to(device)


def _dummy_target_ids(config: DraftConfig, device: torch.device) -> Tensor | None:
    same = config.vocab_size == config.model.vocab_size
    return None if same else torch.arange(config.vocab_size, device=device)


def _share_with_target(
    head: DraftHead, tensors: dict[str, Tensor], config: DraftConfig, source: ModelSource, target: Decoder
) -> frozenset[str]:
    """Fill what the head takes from the target; returns the names that its own checkpoint need not have."""
    wanted = [name for name in ("embed_tokens", "lm_head") if f"{name}.weight" not in tensors]
    if config.method == "eagle3" and "lm_head" in wanted and config.vocab_size != config.model.vocab_size:
        raise ValueError(f"draft: has its own vocabulary of {config.vocab_size} but no lm_head.weight")
    if not wanted:
        return frozenset()
    if head.group == target.group:
        if "embed_tokens" in wanted:
            head.embed_tokens = target.embed_tokens
        if "lm_head" in wanted:
            head.lm_head = target.lm_head
        return frozenset(wanted)
    names = {"model.embed_tokens.weight": "embed_tokens", "lm_head.weight": "lm_head"}
    found = {names[name]: tensor for name, tensor in checkpoint_tensors(source.path) if name in names}
    for name in wanted:
        full = found.get(name, found.get("embed_tokens"))  # a tied target has no lm_head of its own
        if full is None:
            raise ValueError(f"model {source.path}: has no {name} for the draft to share")
        module = head.embed_tokens if name == "embed_tokens" else head.lm_head
        module.load(name, "weight", full)
    return frozenset(wanted)
