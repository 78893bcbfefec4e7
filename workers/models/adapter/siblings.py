"""Finds linear layers of one module that have the same input, and so can be merged into one product."""

from collections import Counter
from dataclasses import dataclass

from torch import Tensor, nn

Group = tuple[str, ...]  # paths of linear layers, in the order of their calls


@dataclass(frozen=True)
class LinearCall:
    """One call of a linear layer. version: number of in-place changes of `x` before the call."""

    path: str
    x: Tensor
    version: int
    has_bias: bool


def record_linear_calls(model: nn.Module) -> list[LinearCall]:
    """Return a list to which the model's next pass adds its calls of linear layers, in order."""
    calls: list[LinearCall] = []

    def record(path: str, module: nn.Linear) -> None:
        def hook(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            if given:  # transformers' models pass the input by position
                calls.append(LinearCall(path, given[0], given[0]._version, module.bias is not None))

        module.register_forward_pre_hook(hook)

    for path, module in model.named_modules():
        if type(module) is nn.Linear:
            record(path, module)
    return calls


def groups_of(calls: list[LinearCall]) -> tuple[Group, ...]:
    """Return the groups of layers of one module with the same input, either all with a bias or all without. Layers that
    are called several times in a pass are in no group."""
    counts = Counter(call.path for call in calls)
    groups: dict[tuple[str, int, int, bool], list[str]] = {}
    for call in calls:  # the calls keep their inputs alive, so that ids are unique
        if counts[call.path] == 1:
            parent = call.path.rpartition(".")[0]
            groups.setdefault((parent, id(call.x), call.version, call.has_bias), []).append(call.path)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
