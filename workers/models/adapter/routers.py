"""Finds routers that choose experts like `aerie.kernels.experts.route`, by comparing results on random rows, and puts
Aerie's experts into the model (`RouterChosenExperts`). A replaced router returns its logits, and the experts' operation
chooses; other routers choose themselves."""

import inspect
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from aerie.kernels.experts.gated import GatedActivation
from aerie.kernels.experts.route import SCORINGS, RouterLogits, Routing, TokenSlots, route
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.experts_method import UnquantizedExperts
from aerie.workers.layers.moe import Experts
from aerie.workers.layers.routing import Router
from aerie.workers.models.adapter.layers import Leaf, own_tensors
from aerie.workers.models.adapter.matching import Mark, RandomNumbers, copied, result_of

_ROWS = 64  # random rows; enough to reveal a router that chooses differently
_SPREAD = 3.0  # standard deviation of random logits
_RTOL, _ATOL = 1e-4, 1e-6  # float32 rounding of logits and weights
_WEIGHT, _BIAS = "weight", "e_score_correction_bias"


@dataclass(frozen=True)
class RouterMatch:
    """A module that computes the same as a `Routing`.

    routing: the equivalent `Routing`.
    results: kinds of the module's three results, in its order: "logits", "weight" (routing weights) and "chosen"
        (indices of the chosen experts).
    linear: name of the submodule that computes the logits; None: the module itself.
    takes_bias: whether the bias is the module's second argument instead of its tensor.
    """

    routing: Routing
    results: tuple[str, ...]
    linear: str | None
    takes_bias: bool


class MatchedRouter(Router):
    """Replaces a transformers router. It chooses no experts: the model passes its logits on to a `RouterChosenExperts`,
    which chooses them.

    live: returns the `TokenSlots` of the running pass, which mark padding rows.
    """

    def __init__(self, match: RouterMatch, hidden_size: int, live: Callable[[], TokenSlots | None]) -> None:
        super().__init__(hidden_size, match.routing)
        self._results, self._live = match.results, live
        if match.takes_bias:
            self.e_score_correction_bias = None

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor | RouterLogits, ...]:  # type: ignore[override]
        """Return as many results as the replaced router did, in its order: the logits [rows, num_experts], and a
        `RouterLogits` in place of the routing weights and of the chosen experts.

        x: [..., hidden_size].
        bias: [num_experts], if the replaced router got it as an argument.
        """
        router = super().forward(x.flatten(0, -2), self._live())
        if bias is not None:
            router = replace(router, bias=bias.float())
        return tuple(router.values if name == "logits" else router for name in self._results)


class RouterShell(nn.Module):
    """Replaces a router whose logits a submodule computes, so that its tensors keep their names."""

    def __init__(self, name: str, router: MatchedRouter) -> None:
        super().__init__()
        self._name = name
        self.add_module(name, router)

    def forward(self, *arguments: Tensor) -> Any:
        return self._modules[self._name](*arguments)  # type: ignore[misc]


def find_router(block: nn.Module, experts: str) -> tuple[str, RouterMatch] | None:
    """Return the name of the experts' router, and its match. None without a match, or if the block does anything else
    with the router's results than pass them to the experts.

    block: the module of transformers that calls both, on the meta device.
    experts: name of the experts in it.
    """
    for name, child in block.named_children():
        for flat in (True, False):
            match = match_router(child, flat) if name != experts else None
            if match is not None and _only_passes(block, name, experts, match, flat):
                return name, match
    return None


def traits_of(block: nn.Module) -> Hashable:
    """Return a key of everything that `find_router` depends on, so that layers of one kind are searched once."""

    def traits(module: nn.Module) -> Hashable:
        plain = [pair for pair in vars(module).items() if isinstance(pair[1], int | float | str)]
        shapes = [(name, tensor.shape) for name, tensor in module.state_dict(keep_vars=True).items()]
        return type(module), tuple(plain), tuple(shapes)

    return tuple((name, traits(module)) for name, module in block.named_modules())


def hidden_of(router: nn.Module, match: RouterMatch) -> int:
    """Return the number of inputs of a transformers router."""
    weight = _holder(router, match.linear)._parameters[_WEIGHT]
    assert weight is not None, "matched"
    return weight.shape[1]


def _holder(router: nn.Module, linear: str | None) -> nn.Module:
    return router if linear is None else router.get_submodule(linear)


def match_router(module: nn.Module, flat: bool) -> RouterMatch | None:
    """Return the module as a router; None without a match. flat: whether it gets [rows, hidden_size]; else [1, rows,
    ...]."""
    children = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
    linear = children[0] if len(children) == 1 and not module._parameters else None
    if linear is None and children:
        return None
    holder = _holder(module, linear)
    weight = holder._parameters.get(_WEIGHT)
    tensors = {*module._parameters, *module._buffers} - {_WEIGHT}
    plain = linear is None or (type(holder) is nn.Linear and holder.bias is None)
    if weight is None or weight.dim() != 2 or not tensors <= {_BIAS} or not plain:
        return None
    arguments = [
        parameter
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.default is parameter.empty
    ]
    takes_bias = len(arguments) == 2
    if len(arguments) > 2 or (takes_bias and tensors):
        return None
    with torch.device("cpu"), torch.no_grad():
        random = RandomNumbers(0)
        rows = random.normal(_ROWS, weight.shape[1])
        full = random.normal(*weight.shape) * (_SPREAD * weight.shape[1] ** -0.5)
        bias = random.uniform(weight.shape[0]) - 0.5 if takes_bias or tensors else None
        x = rows if flat else rows.unsqueeze(0)
        result = _result(_with_tensors(module, linear, full, bias), x, bias if takes_bias else None)
        if result is None:
            return None
        kinds, dense, num_chosen = result
        for routing in _candidates(module, weight.shape[0], num_chosen, bias is not None):
            chosen, share = route(rows @ full.T, bias, routing)
            ours = torch.zeros_like(dense).scatter_(1, chosen, share)
            if torch.allclose(ours, dense, _RTOL, _ATOL):
                return RouterMatch(routing, kinds, linear, takes_bias)
    return None


def _with_tensors(module: nn.Module, linear: str | None, weight: Tensor, bias: Tensor | None) -> Any:
    """Return a copy of a router with these tensors. linear: see `RouterMatch`."""
    other = copied(module)
    if linear is not None:
        holder = other._modules[linear] = copied(other._modules[linear])
        holder._parameters[_WEIGHT] = nn.Parameter(weight, requires_grad=False)
        return other
    other._parameters[_WEIGHT] = nn.Parameter(weight, requires_grad=False)
    if bias is not None and _BIAS in other._parameters:
        other._parameters[_BIAS] = nn.Parameter(bias, requires_grad=False)
    elif bias is not None and _BIAS in other._buffers:
        other._buffers = other._buffers | {_BIAS: bias}
    return other


def _result(module: Any, x: Tensor, bias: Tensor | None) -> tuple[tuple[str, ...], Tensor, int] | None:
    """Return the kinds of the module's results (`RouterMatch.results`), the weight of each expert in each row, and the
    number of chosen experts; None if the module does not return logits, weights and chosen experts."""
    result = result_of(module, x, *(() if bias is None else (bias,)))
    if not isinstance(result, tuple) or len(result) != 3 or not all(isinstance(part, Tensor) for part in result):
        return None
    flat = [part.reshape(-1, part.shape[-1]) for part in result]
    kinds = tuple(_kind_of(part, flat) for part in flat)
    if sorted(kinds) != ["chosen", "logits", "weight"]:
        return None
    by_kind = dict(zip(kinds, flat, strict=True))
    chosen, weight, logits = by_kind["chosen"], by_kind["weight"], by_kind["logits"]
    if any(part.shape[0] != _ROWS for part in flat):
        return None
    dense = torch.zeros(logits.shape, dtype=torch.float32).scatter_(1, chosen, weight.float())
    return kinds, dense, chosen.shape[1]


def _kind_of(result: Tensor, results: list[Tensor]) -> str:
    """Return the kind of one of a router's results: indices are the chosen experts, and logits are the widest."""
    if not result.is_floating_point():
        return "chosen"
    return "logits" if result.shape[1] == max(other.shape[1] for other in results) else "weight"


def _candidates(module: nn.Module, num_experts: int, num_chosen: int, has_bias: bool) -> Iterator[Routing]:
    """Yield the possible routings of the module, with sizes and factors from its attributes."""
    values = list(vars(module).values())
    factors = [1.0, *(value for value in values if isinstance(value, float) and value > 0.0 and value != 1.0)]
    sizes = {value for value in values if type(value) is int and 0 < value <= num_experts}
    cuts = [(n, few, best) for n in sizes for few in sizes for best in (1, 2) if few < n and num_experts % n == 0]
    for (num_groups, few, best), scoring, normalise, factor in product(
        [(1, 1, 1), *cuts], SCORINGS, (False, True), factors
    ):
        size = num_experts // num_groups
        if best <= size and num_chosen <= few * size:
            yield Routing(
                num_experts, num_chosen, scoring, num_groups, few, best, has_bias, normalise=normalise, scale=factor
            )


def _only_passes(block: nn.Module, router: str, experts: str, match: RouterMatch, flat: bool) -> bool:
    """Return whether `block` calls its experts once, with unmodified results of its router."""
    mark, num_experts = Mark(), match.routing.num_experts
    calls: list[bool] = []

    class MarkingRouter(nn.Module):
        """Returns marks in place of weights and chosen experts."""

        def forward(self, x: Tensor, *bias: Tensor) -> tuple[Any, ...]:
            calls.append((x.dim() == 2) == flat and len(bias) == match.takes_bias)
            logits = x.new_empty(x.flatten(0, -2).shape[0], num_experts)
            return tuple(logits if name == "logits" else mark for name in match.results)

    class CheckingExperts(nn.Module):
        """Records whether they get the router's unmodified marks."""

        def forward(self, x: Tensor, chosen: Any, weight: Any) -> Tensor:
            calls.append(chosen is mark and weight is mark)
            return x

    other = copied(block)
    other._modules |= {router: MarkingRouter(), experts: CheckingExperts()}
    x = torch.empty(1, 3, hidden_of(block.get_submodule(router), match), device="meta")
    with torch.no_grad():
        ran = result_of(other, x) is not None
    return ran and calls == [True, True]


_UNLIKELY = -1e30  # logit of an expert that is not chosen; its softmax is 0
_LEAST_WEIGHT = 1e-30  # minimum weight of a chosen expert
_MAX_GATHERED_BYTES = 1 << 28  # bound on the weights gathered at once


@dataclass(frozen=True)
class _ChosenExperts:
    """Experts that the model's own router has chosen; used instead of `RouterLogits`."""

    chosen: Tensor
    weight: Tensor

    def check(self, rows: int) -> None:
        assert self.chosen.shape == self.weight.shape and self.chosen.shape[0] == rows

    def choose(self) -> tuple[Tensor, Tensor]:
        return self.chosen, self.weight


class RouterChosenExperts(Experts):
    """Experts that the model's own router chooses, or a `aerie.workers.models.adapter.routers.MatchedRouter`.

    experts: transformers' module with stacked weights, and its `activation`.
    experts_per_token: experts that the router chooses for a row.
    is_routed: whether the router is a `MatchedRouter`.
    """

    def __init__(
        self,
        experts: nn.Module,
        activation: GatedActivation,
        group: TPGroup,
        experts_per_token: int,
        is_routed: bool,
    ) -> None:
        stacked: Tensor = experts.down_proj  # type: ignore[assignment]
        num_experts, hidden, width = stacked.shape
        super().__init__(num_experts, hidden, width, group, experts_per_token, activation=activation)
        self._group, self._is_routed = group, is_routed
        self._routing = Routing(self.shape.held.total, experts_per_token, normalise=True)

    def forward(self, x: Tensor, chosen: Tensor | RouterLogits, weight: Tensor | RouterLogits) -> Tensor:
        """Return the weighted sum of experts. x: [..., hidden_size]. chosen: [rows, experts of a token] int64. weight:
        [rows, experts of a token], not negative. If `is_routed`, both are the router's logits."""
        rows = x.flatten(0, -2)
        if isinstance(chosen, RouterLogits) or isinstance(weight, RouterLogits):
            assert isinstance(chosen, RouterLogits), "a router returns them in both places"
            return self._group.all_reduce(self.method.multiply(rows, chosen)).view(x.shape)
        weight = weight.float()
        if isinstance(self.method, UnquantizedExperts):
            part = self.method.multiply(rows, _ChosenExperts(chosen, weight))  # type: ignore[arg-type]
        else:
            part = self.method.multiply(rows, logits_of(chosen, weight, self._routing))
            part = (part * weight.sum(-1, keepdim=True)).to(x.dtype)
        return self._group.all_reduce(part).view(x.shape)

    def finish(self, options: GEMMOptions) -> None:
        """Finish the weights, unless they are unquantised and multiplied by `_ChosenExperts`."""
        if self._is_routed or not isinstance(self.method, UnquantizedExperts):
            super().finish(options)
        elif options.deterministic:
            raise ValueError(
                "deterministic=true: Aerie does not know this model's router, so the sums of its experts depend on the "
                "batch; set deterministic: false"
            )


class GatheringExperts(Leaf):
    """Experts for which Aerie has no operation. transformers gathers the weights of each row's experts, so a pass of
    many rows is computed in parts."""

    def forward(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        """Return the weighted sum of experts. x: [rows, hidden_size]. chosen, weight: [rows, experts of a token]."""
        forward: Callable[..., Tensor] = super().forward
        expert_bytes = sum(tensor[0].nbytes for _, tensor in own_tensors(self))
        rows = max(1, _MAX_GATHERED_BYTES // (expert_bytes * chosen.shape[1]))
        parts = zip(*(torch.split(whole, rows) for whole in (x, chosen, weight)), strict=True)
        return forward(x, chosen, weight) if rows >= x.shape[0] else torch.cat([forward(*part) for part in parts])


def logits_of(chosen: Tensor, weight: Tensor, routing: Routing) -> RouterLogits:
    """Return logits from which `routing` chooses these experts, with these weights over their sum. Kernels for
    quantised experts choose from logits.

    chosen: [rows, experts of a token] int64.
    weight: [rows, experts of a token] float32, not negative.
    """
    others = weight.new_full((weight.shape[0], routing.num_experts), _UNLIKELY)
    return RouterLogits(others.scatter(1, chosen, weight.clamp(min=_LEAST_WEIGHT).log()), None, routing)
