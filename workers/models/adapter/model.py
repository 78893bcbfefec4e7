"""`TransformersModel`: a decoder of transformers as a target, with the layers that the other modules of
`aerie.workers.models.adapter` put into it. A decoder layer's addition to the residual and the following norm become one
launch; layers of this form are recognised by comparing results, with narrow stand-ins for their modules (`matching`).
"""

import copy
import inspect
import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import permutations
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from aerie.kernels.capability import Capability
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.forward_context import ForwardContext
from aerie.workers.layers.norm import RMSNorm
from aerie.workers.layers.vocab import LMHead, VocabEmbedding
from aerie.workers.layers.weighted import Unweighted
from aerie.workers.models.adapter.config import AdapterConfig, read_config, transformers_config, weight_names
from aerie.workers.models.adapter.host_constants import HostConstants
from aerie.workers.models.adapter.layers import Head, PagedAttention, RunningPass, own_tensors
from aerie.workers.models.adapter.matching import Mark, RandomNumbers, copied, is_close, tensor_of
from aerie.workers.models.adapter.replace import put_layers
from aerie.workers.models.adapter.rotation import rebind
from aerie.workers.models.adapter.streams import capture_streams
from aerie.workers.models.adapter.survey import UnservableError, decoder, keep_angles, make_model
from aerie.workers.models.decoder import DecoderOutput, TargetModel
from aerie.workers.models.registry import ModelFamily

_WIDTH, _ROWS = 8, 3  # of random inputs
# Arguments that transformers' models pass to their layers besides the hidden states.
_PASSED = ("attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings")


@dataclass(frozen=True)
class Block:
    """h = x + attention(before(x)), then h + mlp(after(h)). Fields are names of the layer's modules.

    in_tuple: attention returns a tuple whose first element is its output.
    passed: names of the layer's arguments that it passes to attention.
    """

    before: str
    attention: str
    after: str
    mlp: str
    in_tuple: bool
    passed: tuple[str, ...]


def fuse_blocks(model: nn.Module, attention_paths: Iterable[str]) -> None:
    """Replace `forward` of the layers that match.

    model: with Aerie's norms in their places.
    attention_paths: paths of the modules that call attention.
    """
    for path in attention_paths:
        parent, _, name = path.rpartition(".")
        layer = model.get_submodule(parent)
        block = match_block(layer, name)
        if block is not None:
            layer.forward = MethodType(_forward_of(layer, block), layer)


def match_block(layer: nn.Module, attention: str) -> Block | None:
    """Return the layer as a `Block`; None if it does not match. attention: name of its attention module."""
    norms = [name for name, child in layer.named_children() if isinstance(child, RMSNorm)]
    others = [name for name, child in layer.named_children() if name not in (*norms, attention) and _has_tensors(child)]
    if len(norms) != 2 or len(others) != 1:
        return None
    for in_tuple in (True, False):
        for before, after in permutations(norms):
            passed = _try(layer, Block(before, attention, after, others[0], in_tuple, ()), mlp_in_tuple=False)
            if passed is not None:
                block = Block(before, attention, after, others[0], in_tuple, passed)
                # if the layer accepts both, its MLP's kind of result is unknown
                return None if _try(layer, block, mlp_in_tuple=True) is not None else block
    return None


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in (*module.parameters(), *module.buffers()))


class _StandIn(nn.Module):
    """tanh(x W). given: arguments of its last call by name, without the hidden states."""

    def __init__(self, weight: Tensor, in_tuple: bool) -> None:
        super().__init__()
        self.product, self.in_tuple = weight, in_tuple
        self.passed: dict[str, Any] = {}

    def forward(self, hidden_states: Tensor, **passed: Any) -> Any:
        self.passed = passed
        out = torch.tanh(hidden_states @ self.product)
        return (out, None) if self.in_tuple else out


def _try(layer: nn.Module, block: Block, mlp_in_tuple: bool) -> tuple[str, ...] | None:
    """Return the names of `_PASSED` that attention gets if the layer computes the same as the block, else None."""
    random = RandomNumbers(0)
    with torch.device("cpu"), torch.no_grad():
        names = (block.before, block.attention, block.after, block.mlp)
        stand_ins = {name: _StandIn(random.normal(_WIDTH, _WIDTH), False) for name in names}
        before, attention, after, mlp = stand_ins.values()
        attention.in_tuple, mlp.in_tuple = block.in_tuple, mlp_in_tuple
        narrow = copied(layer)
        narrow._modules |= stand_ins
        x = random.normal(1, _ROWS, _WIDTH)
        passed = {name: Mark() for name in _PASSED}
        result = tensor_of(narrow, x, **passed)
        if result is None:
            return None
        got = {name: value for name, value in attention.passed.items() if value is passed.get(name)}
        if len(got) < len(attention.passed):
            return None
        attention.in_tuple = mlp.in_tuple = False
        sums = x + attention(before(x))
        return tuple(got) if is_close(sums + mlp(after(sums)), result) else None


def _forward_of(layer: nn.Module, block: Block) -> Any:
    """Return a `forward` for the layer."""
    names = list(inspect.signature(layer.forward).parameters)[1:]

    def forward(self: nn.Module, hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        named |= dict(zip(names, arguments, strict=False))
        before, attention, after, mlp = (
            self._modules[name] for name in (block.before, block.attention, block.after, block.mlp)
        )
        passed = {name: named[name] for name in block.passed if name in named}
        attended = attention(before(hidden_states), **passed)  # type: ignore[misc]
        attended = (attended[0] if block.in_tuple else attended).contiguous()
        # the sum is written to `attended`, which is used nowhere else; drafts may read `hidden_states`
        normed, sums = after.add(hidden_states.contiguous(), attended)  # type: ignore[union-attr, operator]
        return sums + mlp(normed)  # type: ignore[no-any-return, misc]

    return forward


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
        self._pass = RunningPass(device, {call.cached_dim for call in config.calls})
        self._host_constants = HostConstants(device)
        for layer, call in enumerate(config.calls):
            paged = PagedAttention(layer, call, config.score_rule(layer), group, self._pass)
            module = theirs.get_submodule(call.module)
            module.paged = paged
            if call.rotary is not None:
                rebind(module, {call.rotary: self._pass.postpone_rope})
        head = theirs.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise UnservableError(f"is a {type(theirs).__name__}, which has no vocabulary head")
        put_layers(theirs, config, group, self._pass)
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
        """Return the hidden states of rows ids [rows] int64, and write their KV to the context's pool."""
        self._streams.clear()
        with self._pass.over(context), self._host_constants.over_pass():
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
        shell._modules = dict(theirs._modules) | {theirs.base_model_prefix: _PassingDecoder()}
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


class _PassingDecoder(nn.Module):
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
        """Compute the constants by the code of transformers. Raises UnservableError for one that it leaves out."""
        owner: PreTrainedModel = self._theirs[0]
        for module in owner.modules():  # models come before their modules
            owner = module if isinstance(module, PreTrainedModel) else owner
            if module._non_persistent_buffers_set:
                loaded = [tensor.clone() for _, tensor in own_tensors(module)]
                _forget_constants(module)
                owner._init_weights(module)  # computes constants, but also resets loaded tensors: put those back
                _check_constants(module)
                for (_, tensor), value in zip(own_tensors(module), loaded, strict=True):
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
