"""Fuses the residual addition and the following norm of decoder layers into one launch.

Such layers are found by comparing results, with narrow stand-ins for a layer's modules, as in
`aerie.workers.models.adapter.matching`.
"""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import permutations
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from aerie.workers.layers.norm import RMSNorm
from aerie.workers.models.adapter.matching import Mark, RandomNumbers, copied, is_close, tensor_of

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
                found = Block(before, attention, after, others[0], in_tuple, passed)
                # if the layer accepts both, its MLP's kind of result is unknown
                return None if _try(layer, found, mlp_in_tuple=True) is not None else found
    return None


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in (*module.parameters(), *module.buffers()))


class _StandIn(nn.Module):
    """tanh(x W). given: arguments of its last call by name, without the hidden states."""

    def __init__(self, weight: Tensor, in_tuple: bool) -> None:
        super().__init__()
        self.product, self.in_tuple = weight, in_tuple
        self.given: dict[str, Any] = {}

    def forward(self, hidden_states: Tensor, **given: Any) -> Any:
        self.given = given
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
        found = tensor_of(narrow, x, **passed)
        if found is None:
            return None
        got = {name: value for name, value in attention.given.items() if value is passed.get(name)}
        if len(got) < len(attention.given):
            return None
        attention.in_tuple = mlp.in_tuple = False
        sums = x + attention(before(x))
        return tuple(got) if is_close(sums + mlp(after(sums)), found) else None


def _forward_of(layer: nn.Module, block: Block) -> Any:
    """Return a `forward` for the layer."""
    names = list(inspect.signature(layer.forward).parameters)[1:]

    def forward(self: nn.Module, hidden_states: Tensor, *given: Any, **named: Any) -> Tensor:
        named |= dict(zip(names, given, strict=False))
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
