"""From a published draft checkpoint to a head on this rank."""

import torch
from torch import Tensor

from speculative.config import SpeculativeConfig
from speculative.draft_models.config import DraftConfig
from speculative.draft_models.eagle import HEADS, DraftHead
from workers.config import ModelSource
from workers.distributed.tp_group import TPGroup
from workers.layers.linear import finish_weights
from workers.layers.weighted import WeightKey
from workers.models.decoder import Decoder
from workers.models.loading import allocate
from workers.models.name_map import NameMap
from workers.models.weights import checkpoint_tensors, fill_dummy, load_weights

_SHARED_RULES = {name: name for name in ("embed_tokens", "lm_head", "fc", "norm")}
_IGNORED = ("t2d", "*rotary_emb*")


def _layer_rules(layer: str) -> dict[str, str]:
    return {
        f"{layer}.self_attn.qkv": f"{layer}.self_attn.{{part}}",
        f"{layer}.mlp.gate_up": f"{layer}.mlp.{{part}}",
        f"{layer}.{{block}}.{{module}}": f"{layer}.{{block}}.{{module}}",
        f"{layer}.{{norm}}": f"{layer}.{{norm}}",
    }


# By method. Some published EAGLE-3 heads call their layer layers.0.
WEIGHT_NAMES = {
    "eagle": NameMap(_SHARED_RULES | _layer_rules("layers.0"), (("model.", ""),), _IGNORED),
    "eagle3": NameMap(_SHARED_RULES | _layer_rules("midlayer"), (("model.", ""), ("layers.0.", "midlayer.")), _IGNORED),
}


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
    names, dtype = WEIGHT_NAMES[config.method], next(target.parameters()).dtype
    make = HEADS[config.method]
    head = allocate(lambda: make(config, group, max_position, device), names, config.model.quant, dtype, device)
    if source.load_format == "dummy":
        fill_dummy(head, source.seed + 1)
        head.target_ids = _dummy_target_ids(config, device)
        finish_weights(head)
        return head.eval()
    tensors = {names.canonical(name): tensor for name, tensor in checkpoint_tensors(speculative.path)}
    head.target_ids = _target_ids(tensors, config, f"draft {speculative.path}", device)
    shared = _share_with_target(head, tensors, config, source, target)
    load_weights(head, tensors.items(), names, f"draft {speculative.path}", elsewhere=shared)
    finish_weights(head)
    return head.eval()


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
        module.load(WeightKey("weight"), full)
    return frozenset(wanted)
