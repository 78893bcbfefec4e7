"""An operation: a contract, a torch reference, and a table of faster implementations.

    @operation(
        Implementation("triton", "aerie.kernels.norm.norm_triton:rms_norm", on_gpu),
    )
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        \"\"\"The contract: what is computed, shapes, dtypes, what is written in place, limits, source.\"\"\"
        ...  # the reference, in torch

`@operation(..., contract=check)`: in tests and in debug mode (`aerie.kernels.contracts`) every call first calls
`check` with its arguments. It asserts what the kernels require, so that tests on a CPU, which run the reference, find
calls that a GPU would refuse. Checks read no values.

A call of `rms_norm` runs the first implementation that supports the device and the arguments, else the reference. The
device is that of the first tensor argument, or of the first tensor in a dataclass argument. A CUDA graph keeps the
choice made at its capture. `tests/kernels/ops` tests every implementation against the reference; `python -m
aerie.kernels` prints the tables.
"""

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from functools import cached_property, update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from aerie.kernels import contracts
from aerie.kernels.capability import Capability
from aerie.kernels.lazy_import import load

P = ParamSpec("P")
R = TypeVar("R")

Needs = Callable[[Capability], bool]


def anywhere(device: Capability) -> bool:
    return True


def on_gpu(device: Capability) -> bool:
    """Return whether Triton kernels run: on any GPU that PyTorch supports."""
    return device.is_gpu


def on_host(device: Capability) -> bool:
    """Return whether numpy reads the device's tensors in place."""
    return device.shares_host_memory


@dataclass(frozen=True)
class Implementation:
    """One row of an operation's table.

    name: library or kernel.
    target: "module:function" or "module:Class.method" with the operation's signature. Imported at its first use, so
        unused libraries need not be installed.
    needs: whether a device can run it.
    serves: whether it accepts given arguments; None: it accepts all that the contract allows.
    limits: `serves` in words, for the printed table.
    """

    name: str
    target: str
    needs: Needs
    serves: Callable[..., bool] | None = None
    limits: str = ""

    @cached_property
    def function(self) -> Callable[..., Any]:
        function: Callable[..., Any] = load(self.target)
        return function


class Operation(Generic[P, R]):
    """An operation, called like its reference.

    reference: the operation in torch, which runs if no implementation supports the device and the arguments.
    contract: called with the arguments of every call while `contracts.checked`; raises AssertionError for arguments
        that a kernel would refuse.
    """

    def __init__(
        self,
        reference: Callable[P, R],
        implementations: tuple[Implementation, ...],
        contract: Callable[..., None] | None = None,
    ) -> None:
        self.reference = reference
        self.contract = contract
        self.implementations = implementations
        self._by_device: dict[torch.device, tuple[Implementation, ...]] = {}
        self.name = f"{reference.__module__}.{reference.__name__}"
        update_wrapper(self, reference)
        OPERATIONS.append(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if contracts.checked and self.contract is not None:
            self.contract(*args, **kwargs)
        first = args[0] if args else None
        device = first.device if isinstance(first, torch.Tensor) else _device_of((*args, *kwargs.values()))
        serving = self._by_device.get(device)
        if serving is None:
            serving = self._by_device[device] = self.serving(Capability.of(device))
        for implementation in serving:
            if implementation.serves is None or implementation.serves(*args, **kwargs):
                result: R = implementation.function(*args, **kwargs)
                return result
        return self.reference(*args, **kwargs)

    def serving(self, device: Capability) -> tuple[Implementation, ...]:
        """Return the implementations for a device, in order of preference."""
        return tuple(implementation for implementation in self.implementations if implementation.needs(device))


def _device_of(arguments: tuple[object, ...]) -> torch.device:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return argument.device
    fields = (value for argument in arguments if is_dataclass(argument) for value in vars(argument).values())
    return next(value.device for value in fields if isinstance(value, torch.Tensor))


OPERATIONS: list[Operation[..., Any]] = []
"""All operations that have been imported."""


def operation(
    *implementations: Implementation, contract: Callable[..., None] | None = None
) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Make the decorated function an operation's contract and reference. contract: see `Operation`."""
    return lambda reference: Operation(reference, implementations, contract)
