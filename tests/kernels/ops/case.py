"""What a case of an operation is: arguments that an operation can be given, and how near its implementations must come.

Every operation has its cases in a module of this folder, named after the operation's (`norm_cases` for
`aerie.kernels.norm.norm`), as a tuple CASES.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aerie.kernels.operation import Operation
from tests.support.slow import cover

TYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""Relative, for results of sums of up to 10^4 terms, rounded once or twice to their type."""


@dataclass(frozen=True)
class Case:
    """operation: whose. name: of the case. arguments: makes them on a device, the same ones every time.
    written: positions of arguments that the operation writes; they are compared as the result is. Objects are compared
    by their tensors.
    exact: whether implementations must give the reference's bits. tolerance: if not, relative to the largest expected
    number; None: TOLERANCE of the result's type.
    seen: what of a result must agree, given the arguments and the result; None: all of it.
    slow: under Triton's interpreter; on GPUs it runs. Of the others the interpreter runs `quick_cases` by default.
    """

    operation: Operation[..., Any]
    name: str
    arguments: Callable[[torch.device], tuple[Any, ...]]
    written: tuple[int, ...] = ()
    exact: bool = False
    tolerance: float | None = None
    seen: Callable[[tuple[Any, ...], Any], Any] | None = None
    slow: bool = False


def quick_cases(cases: Sequence[Case]) -> list[Case]:
    """Return few cases that have every setting which some case of its operation has, in the given order. A case's
    settings are the parts of its name between hyphens."""
    names = [(case.operation.__name__, case.name.split("-")) for case in cases]
    chosen = cover([[(operation, len(parts), part) for part in parts] for operation, parts in names], strength=1)
    return [case for i, case in enumerate(cases) if i in chosen]
