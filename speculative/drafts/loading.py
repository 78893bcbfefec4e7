"""Loads a published draft checkpoint as a `DraftModel` on this rank."""

import logging
from collections.abc import Iterable, Set
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from aerie.kernels.capability import Capability
from aerie.speculative.drafts.checkpoint_files import draft_tensors
from aerie.speculative.drafts.eagle3_config import target_ids
from aerie.speculative.drafts.method import DraftMethod, DraftModel
from aerie.speculative.drafts.trimmed_head import FILE, gathered_rows, head_ids
from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.linear import finish_weights
from aerie.workers.layers.vocab import LMHead
from aerie.workers.layers.weighted import WeightedModule, WeightKey
from aerie.workers.models.decoder import TargetModel
from aerie.workers.models.loading import allocate, check_finite, weight_names
from aerie.workers.models.name_map import NameMap
from aerie.workers.models.weights import CheckpointTensor, checkpoint_tensors, fill_dummy, load_weights
from aerie.workers.quantization.quant_method import QuantMethod, Unquantized
from aerie.workers.runner.weight_update import CPU, META, Read, RunningModel

logger = logging.getLogger(__name__)

Copies = dict[str, list[tuple[WeightedModule, WeightKey]]]


def load_draft(
    method: DraftMethod,
    source: ModelSource,
    target: TargetModel,
    group: TPGroup,
    device: torch.device,
    max_position: int,
) -> DraftModel:
    """Load this rank's part of the draft.

    If the checkpoint lacks embedding or vocabulary head, the draft uses the target's: the same module if both are
    sharded alike, else a copy from the target's checkpoint.

    source: the target's checkpoint.
    Raises ValueError naming missing, unknown or non-finite tensors.
    """
    model = fill_draft(method, source, target, group, device, max_position)
    finish_weights(model)
    return model.eval()


def fill_draft(
    method: DraftMethod,
    source: ModelSource,
    target: TargetModel,
    group: TPGroup,
    device: torch.device,
    max_position: int,
) -> DraftModel:
    """Do `load_draft` without packing the weights.

    device: "meta" checks headers only, as in `fill_target`; `target` must then be on "meta", too, and sharded alike.
    """
    names = method.weight_names
    model = _allocate(method, target, group, max_position, device)
    if source.load_format == "dummy":
        fill_dummy(model, source.seed + 1, group.rank)
        model.target_ids = _dummy_target_ids(method, device)
    else:
        tensors = {names.canonical(entry.name): entry for entry in draft_tensors(method.path, device)}
        vocabulary = {name: tensors.pop(name).tensor for name in list(tensors) if name in ("d2t", "t2d")}
        ids = take_target_ids(vocabulary, method) if method.head_rows is None else _trimmed_ids(method, source, target)
        model.target_ids = None if ids is None else ids.to(device)
        tensors = {name: tensor for name, tensor in tensors.items() if not names.ignores(name)}
        shared = model.from_target = _share_with_target(model, tensors.keys(), method, source, target)
        load_weights(model, tensors.values(), names, f"draft {method.path}", elsewhere=shared)
        if Capability.of(device).has_memory:
            check_finite(model, tensors.values, names, f"draft {method.path}", elsewhere=shared)
    return model


def running_draft(
    model: DraftModel, method: DraftMethod, source: ModelSource, target: TargetModel, max_position: int
) -> RunningModel:
    """Return a loaded draft as a model whose weights can be loaded again. Arguments: see `load_draft`."""

    def has_same_ids(name: str, tensor: Tensor) -> bool:
        """Return whether `d2t` or `t2d` of new weights names the served vocabulary, which cannot change."""
        if method.head_rows is not None:
            return False
        ids = torch.arange(method.vocab_size) if model.target_ids is None else model.target_ids.cpu()
        if name == "d2t":
            return tensor.shape == ids.shape and any(
                torch.equal(candidate, ids) for candidate in (tensor, target_ids(tensor))
            )
        members = _members(tensor, method.vocab_size)
        return members is None or torch.equal(members, ids.sort().values)

    def follow(read: Read) -> None:
        """Copy the draft's parts of the target again after its weights changed. read: yields the target's tensors."""
        if method.head_rows is not None and "lm_head" in model.from_target:
            assert model.target_ids is not None
            rows = gathered_rows(target.lm_head, model.target_ids, f"draft {method.path}")
            model.lm_head.reopen()
            model.lm_head.load(WeightKey("weight"), rows)
        if model.copied:
            _load_copies(_copies(model, model.copied, source, target), read(CPU), _target_names(source, target))
        for module in (model.embed_tokens, model.lm_head):
            module.reloaded()

    return RunningModel(
        f"draft {method.path}",
        model,
        names=method.weight_names,
        make_twin=lambda: _allocate(method, target, model.group, max_position, META),
        read_folder=draft_tensors,
        elsewhere=model.from_target,
        fixed={name: partial(has_same_ids, name) for name in ("d2t", "t2d")},
        follow=follow,
    )


def _allocate(
    method: DraftMethod, target: TargetModel, group: TPGroup, max_position: int, device: torch.device
) -> DraftModel:
    """Build the draft with uninitialised parameters."""
    dtype = next(target.parameters()).dtype
    names, quant = method.weight_names, method.model.quant
    return allocate(lambda: method.build(group, max_position, device), names, quant, dtype, device)


def _trimmed_ids(method: DraftMethod, source: ModelSource, target: TargetModel) -> Tensor:
    """Choose the rows of a trimmed head, and log it."""
    size, whole = method.vocab_size, target.config.vocab_size
    ids = head_ids(source.path, whole, size, target.config.eos_token_ids)
    if target.group.rank == 0 and Capability.of(next(target.parameters()).device).has_memory:
        by = FILE if (Path(source.path) / FILE).is_file() else f"the tokenizer's order; aerie token-map makes {FILE}"
        logger.info("draft: its vocabulary head has %d of the target's %d tokens, chosen by %s", size, whole, by)
    return ids


def _dummy_target_ids(method: DraftMethod, device: torch.device) -> Tensor | None:
    same = method.vocab_size == method.model.vocab_size
    return None if same else torch.arange(method.vocab_size, device=device)


def _share_with_target(
    model: DraftModel, tensors: Set[str], method: DraftMethod, source: ModelSource, target: TargetModel
) -> frozenset[str]:
    """Give the draft the modules that it shares with the target. Return the names that its checkpoint may lack."""
    if method.head_rows is not None and "lm_head.weight" not in tensors:
        assert model.target_ids is not None, "its ids are read with the checkpoint"
        rows = gathered_rows(target.lm_head, model.target_ids, f"draft {method.path}")
        model.lm_head = _head(model, Unquantized(), _target_names(source, target), target)
        model.lm_head.load(WeightKey("weight"), rows)
        return _share_with_target(model, tensors | {"lm_head.weight"}, method, source, target) | {"lm_head"}
    lacking = [part for part in ("embed_tokens", "lm_head") if not any(name.startswith(f"{part}.") for name in tensors)]
    if "lm_head" in lacking and method.vocab_size != method.model.vocab_size:
        raise ValueError(
            f"draft {method.path}: has its own vocabulary of {method.vocab_size} but no lm_head.weight; "
            "use a complete checkpoint"
        )
    width = method.model.hidden_size
    widths = {"embed_tokens": method.embedding_size, "lm_head": width}
    # an embedding may be narrower than the layers (OPT)
    theirs = {"embed_tokens": target.embed_tokens.weight.shape[1], "lm_head": target.config.hidden_size}
    other = [name for name in lacking if widths[name] != theirs[name]]
    if other and not _ties_head(method, lacking):
        raise ValueError(
            f"draft {method.path}: has hidden_size={width} but no {other[0]}.weight, and that of the target has "
            f"width {theirs[other[0]]}; use a complete checkpoint"
        )
    if not lacking:
        return frozenset()
    if _ties_head(method, lacking):
        shard = model.lm_head.shard
        model.lm_head = LMHead(shard.vocab_size, width, shard.group, tied=model.embed_tokens)
        return frozenset(lacking)
    if model.group == target.group:
        if "embed_tokens" in lacking:
            model.embed_tokens = target.embed_tokens
        if "lm_head" in lacking:
            model.lm_head = target.lm_head
        return frozenset(lacking)
    _copy_from_target(model, lacking, source, target)
    return frozenset(lacking)


def _copy_from_target(model: DraftModel, lacking: list[str], source: ModelSource, target: TargetModel) -> None:
    """Fill embedding and vocabulary head from the target's checkpoint; the head keeps its format."""
    names, tied = _target_names(source, target), target.config.tie_embeddings
    if "lm_head" in lacking:
        model.lm_head = _head(model, Unquantized() if tied else target.config.quant, names, target)
    model.copied = tuple(lacking)
    wanted = _copies(model, lacking, source, target)
    _load_copies(wanted, checkpoint_tensors(source.path), names)
    for tensor_name, places in wanted.items():
        if not all(module.fill_missing(key) for module, key in places):
            raise ValueError(f"model {source.path}: has no {tensor_name} for the draft to share")


def _copies(model: DraftModel, copied: Iterable[str], source: ModelSource, target: TargetModel) -> Copies:
    """Return the draft's copies of the target's tensors, by name. copied: which of "embed_tokens" and "lm_head"."""
    names, tied = _target_names(source, target), target.config.tie_embeddings
    wanted: Copies = {}
    for name in copied:
        module: WeightedModule = model.embed_tokens if name == "embed_tokens" else model.lm_head
        for key in module.weight_keys():
            wanted.setdefault(names.tensor_name("embed_tokens" if tied else name, key), []).append((module, key))
    return wanted


def _load_copies(wanted: Copies, tensors: Iterable[CheckpointTensor], names: NameMap) -> None:
    """Load the copies that are among `tensors`, and remove them from `wanted`."""
    for stored_name, tensor, _ in tensors:
        for module, key in wanted.pop(names.canonical(stored_name), ()):
            module.reopen()
            module.load(key, tensor)


def _head(model: DraftModel, quant: QuantMethod, names: NameMap, target: TargetModel) -> LMHead:
    """Return an uninitialised vocabulary head with the draft's sizes and the target's quantisation `quant`."""
    shard, hidden = model.lm_head.shard, model.lm_head.shape.in_features
    like = next(target.parameters())
    made = allocate(
        lambda: nn.ModuleDict({"lm_head": LMHead(shard.vocab_size, hidden, shard.group)}),
        names,
        quant,
        like.dtype,
        like.device,
    )
    head = made["lm_head"]
    assert isinstance(head, LMHead)
    return head


def _target_names(source: ModelSource, target: TargetModel) -> NameMap:
    return weight_names(target.config, f"model {source.path}")


def _ties_head(method: DraftMethod, lacking: list[str]) -> bool:
    """Return whether the vocabulary head is tied to the checkpoint's own embedding."""
    return lacking == ["lm_head"] and method.model.tie_embeddings


def take_target_ids(tensors: dict[str, Tensor], method: DraftMethod) -> Tensor | None:
    """Return the target id of each draft id, [draft vocabulary] int64; None if the vocabularies are the same. Removes
    `d2t` and `t2d` from `tensors`.

    d2t: [draft vocabulary] integers to add to draft ids. Some checkpoints have the target ids themselves here, which is
        detected by t2d.
    t2d: [target vocabulary] bool, whether the draft has this token. It has no order, so it cannot replace a missing
        d2t.

    Raises ValueError if the vocabularies differ and there is no map, or one for another target.
    """
    source, vocab_size, target_size = f"draft {method.path}", method.vocab_size, method.model.vocab_size
    offsets, members = tensors.pop("d2t", None), _members(tensors.pop("t2d", None), vocab_size)
    if offsets is None:
        if vocab_size == target_size:
            return None
        raise ValueError(
            f"{source}: has its own vocabulary of {vocab_size} but no d2t, so nothing says which of the target's "
            "tokens these are; use a checkpoint that has d2t"
        )
    if offsets.shape != (vocab_size,):
        raise ValueError(f"{source}: d2t has shape {tuple(offsets.shape)}, draft_vocab_size={vocab_size}")
    ids = target_ids(offsets)
    if members is not None and torch.equal(offsets.long().sort().values, members):
        ids = offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= target_size:
        raise ValueError(
            f"{source}: d2t points outside the target's vocabulary of {target_size}; it belongs to another target"
        )
    if members is not None and not torch.equal(ids.sort().values, members):
        raise ValueError(
            f"{source}: d2t and t2d name different tokens of the target, whether d2t has offsets or ids; use a "
            "checkpoint whose d2t and t2d agree"
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
