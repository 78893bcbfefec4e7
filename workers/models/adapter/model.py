"""`TransformersModel`: a decoder of transformers as a target."""

import copy
import json
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from aerie.kernels.capability import Capability
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.forward_context import ForwardContext
from aerie.workers.layers.vocab import LMHead, VocabEmbedding
from aerie.workers.layers.weighted import Unweighted
from aerie.workers.models.adapter.blocks import fuse_blocks
from aerie.workers.models.adapter.config import AdapterConfig, read_config, transformers_config, weight_names
from aerie.workers.models.adapter.host_constants import HostConstants
from aerie.workers.models.adapter.layers import Head, PagedAttention, Passing, own_tensors
from aerie.workers.models.adapter.replace import put_layers
from aerie.workers.models.adapter.rotation import rebind
from aerie.workers.models.adapter.streams import capture_streams
from aerie.workers.models.adapter.survey import UnservableError, decoder, keep_angles, make_model
from aerie.workers.models.decoder import DecoderOutput, TargetModel
from aerie.workers.models.registry import ModelFamily


class TransformersModel(TargetModel):
    """See `TargetModel`. Built on the meta device. max_position is unused, because the model computes its own RoPE
    angles."""

    def __init__(
        self,
        config: AdapterConfig,
        group: TPGroup,
        max_position: int,
        device: torch.device,
        capture: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.config, self.group, self.capture = config, group, capture
        theirs = make_model(transformers_config(json.loads(config.raw), config.architecture))
        self._passing = Passing(device, {call.kept_dim for call in config.calls})
        self._host_constants = HostConstants(device)
        for layer, call in enumerate(config.calls):
            paged = PagedAttention(layer, call, config.score_rule(layer), group, self._passing)
            module = theirs.get_submodule(call.module)
            module.paged = paged
            if call.rotary is not None:
                rebind(module, {call.rotary: self._passing.defer})
        head = theirs.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise UnservableError(f"is a {type(theirs).__name__}, which has no vocabulary head")
        put_layers(theirs, config, group, self._passing)
        fuse_blocks(theirs, [call.module for call in config.calls])
        embedding = theirs.get_input_embeddings()
        assert isinstance(embedding, VocabEmbedding), "put there"
        tied = embedding if config.tie_embeddings else None
        theirs.set_output_embeddings(Head(config.vocab_size, config.hidden_size, group, tied, head.bias is not None))
        self.theirs = theirs
        self.embed_tokens = embedding
        self.lm_head = _Head(theirs, device)  # type: ignore[assignment]
        self.constants = _Constants(theirs)
        self._streams: dict[int, Tensor] = {}
        if capture:
            if config.layers is None:
                raise UnservableError(
                    f"{config.architecture}: the draft reads hidden states between layers, which have another shape in "
                    "this model; use method: suffix, or no draft"
                )
            layers = theirs.get_submodule(config.layers)
            assert isinstance(layers, nn.ModuleList), "found as one"
            capture_streams(layers, capture, self._streams.__setitem__)

    def forward(self, ids: Tensor, context: ForwardContext) -> DecoderOutput:
        """ids: [rows] int64. Writes the rows' KV to the context's pool."""
        self._streams.clear()
        with self._passing.over(context), self._host_constants.over_pass():
            inputs = {"input_ids": ids.unsqueeze(0)}
            if context.inputs is not None:
                inputs = {"inputs_embeds": context.embedded(self.embed_tokens(ids)).unsqueeze(0)}
            out = decoder(self.theirs)(**inputs, position_ids=context.positions.unsqueeze(0), use_cache=False)
        hidden = out[0].squeeze(0)
        if context.last is not None:
            hidden = context.last.attending_rows(hidden)
        captured = [self._streams[layer].squeeze(0) for layer in self.capture]
        return DecoderOutput(hidden, torch.cat(captured, dim=-1) if captured else None)


class _Head(nn.Module):
    """The vocabulary head, and the model's processing of logits after it.

    shard: this rank's vocabulary shard.
    """

    def __init__(self, theirs: PreTrainedModel, device: torch.device) -> None:
        super().__init__()
        head = theirs.get_output_embeddings()
        assert isinstance(head, LMHead), "put there"
        self.shard = head.shard
        # a copy of the whole model whose decoder returns its input
        shell = copy.copy(theirs)
        shell._modules = dict(theirs._modules) | {theirs.base_model_prefix: _Given()}
        self._shell = (shell,)  # the tuple keeps it from being a submodule
        self._linear = (head,)
        self._host_constants = HostConstants(device)

    @property
    def method(self) -> Any:
        """See `LMHead`."""
        return self._linear[0].method

    def scaled(self, hidden: Tensor, divisor: float, soft_cap: float | None) -> Tensor:
        """See `LMHead`. A draft's factors replace the model's processing of logits."""
        return self._linear[0].scaled(hidden, divisor, soft_cap)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [rows, shard size] of hidden [rows, hidden_size]."""
        with self._host_constants.over_pass():
            logits: Tensor = self._shell[0](inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
        return self.shard.mask_padding(logits.squeeze(0))


class _Output(BaseModelOutputWithPast):  # type: ignore[misc]
    """A decoder's output, with None for fields that the caller does not use."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Given(nn.Module):
    @property
    def decoder(self) -> nn.Module:
        """The decoder; in some models a submodule's (OPT)."""
        return self

    def forward(self, *ids: Any, inputs_embeds: Tensor, **others: Any) -> BaseModelOutputWithPast:
        return _Output(last_hidden_state=inputs_embeds)


class _Constants(Unweighted):
    """Computes the model's tensors that checkpoints lack, such as RoPE frequencies."""

    def __init__(self, theirs: PreTrainedModel) -> None:
        super().__init__()
        self._theirs = (theirs,)

    def finish(self, options: GEMMOptions) -> None:
        owner: PreTrainedModel = self._theirs[0]
        for module in owner.modules():  # models come before their modules
            owner = module if isinstance(module, PreTrainedModel) else owner
            if module._non_persistent_buffers_set:
                kept = [tensor.clone() for _, tensor in own_tensors(module)]
                _forget_constants(module)
                owner._init_weights(module)
                _check_constants(module)
                for (_, tensor), value in zip(own_tensors(module), kept, strict=True):
                    tensor.data.copy_(value)
            keep_angles(module)  # `AdapterConfig.max_position` ends before angles change


def _forget_constants(module: nn.Module) -> None:
    """Fill the module's uninitialised constants with a mark value."""
    for name in module._non_persistent_buffers_set:
        constant = module._buffers[name]
        if constant is not None and constant.dtype != torch.bool:
            constant.fill_(_mark_of(constant))


def _check_constants(module: nn.Module) -> None:
    """Raise UnservableError for a constant that still has the mark value, and so was not computed."""
    for name in module._non_persistent_buffers_set:
        constant = module._buffers[name]
        if constant is None or constant.dtype == torch.bool or not Capability.of(constant.device).has_memory:
            continue
        marked = constant.isnan() if constant.is_floating_point() else constant == _mark_of(constant)
        if bool(marked.any()):
            kind = type(module).__name__
            raise UnservableError(f"has a {kind} whose {name} transformers does not compute when weights are loaded")


def _mark_of(constant: Tensor) -> float:
    return float("nan") if constant.is_floating_point() else torch.iinfo(constant.dtype).min


FAMILY: ModelFamily[AdapterConfig] = ModelFamily(read_config, TransformersModel, weight_names)
"""The family of every decoder of transformers that has no family of its own."""
