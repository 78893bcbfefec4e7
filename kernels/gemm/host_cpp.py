"""Products of float32 rows with a `HostWeight` on CPUs; an implementation of `aerie.kernels.gemm.choice.choose_gemm`.
The weight is kept in one copy.

A row's result does not depend on the other rows or their number.
"""

from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from aerie.kernels.cpp_library import function
from aerie.kernels.gemm.choice import TorchGEMM
from aerie.kernels.gemm.host_weight import BLOCK, HostWeight, stored_exactly
from aerie.kernels.gemm.workspace import GEMMOptions

_CONVERTED_ROWS = 24  # MIN_CONVERTED_ROWS in products.h: such products need scratch memory
_WEIGHT = (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int32)


@cache
def _functions() -> tuple[Any, Any]:
    p, i, n = c_void_p, c_int64, c_int32
    return function("product", *_WEIGHT, p, i, i, p, p, i, n, p), function("weight_rows", *_WEIGHT, p, i, p, n)


def _arguments(weight: HostWeight) -> tuple[Any, ...]:
    codes, scales, offsets = (
        None if t is None else t.data_ptr() for t in (weight.codes, weight.scales, weight.offsets)
    )
    return codes, scales, offsets, weight.outputs, weight.inputs, weight.group, weight.format


def scratch_size(weight: HostWeight, rows: int) -> int:
    """Return the float32 numbers of scratch memory that a product of `rows` rows needs."""
    if weight.offsets is None and rows < _CONVERTED_ROWS:
        return 0
    return torch.get_num_threads() * weight.inputs * BLOCK + rows * (weight.inputs // weight.group)


def multiply(weight: HostWeight, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return x W^T + bias: [rows, outputs] float32.

    x: [rows, inputs] float32, last stride 1.
    bias: [outputs] float32, or None.
    out: contiguous memory for the result; None allocates it.
    """
    rows, threads = x.shape[0], torch.get_num_threads()
    out = torch.empty((rows, weight.outputs), dtype=torch.float32) if out is None else out
    size = scratch_size(weight, rows)
    scratch = torch.empty(size, dtype=torch.float32) if size else None
    _functions()[0](
        *_arguments(weight),
        x.data_ptr(),
        x.stride(0),
        rows,
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        weight.outputs,
        threads,
        None if scratch is None else scratch.data_ptr(),
    )
    return out


def rows_of(weight: HostWeight, ids: Tensor) -> Tensor:
    """Return rows `ids` [n] int64 of the weight, dequantised: [n, inputs] float32."""
    ids = ids.contiguous()
    out = torch.empty((ids.shape[0], weight.inputs), dtype=torch.float32)
    _functions()[1](*_arguments(weight), ids.data_ptr(), ids.shape[0], out.data_ptr(), torch.get_num_threads())
    return out


@dataclass(frozen=True)
class HostGEMM(TorchGEMM):
    """A linear layer's product in the C++ kernels.

    weight: the codes. stored: the weight with its scales.
    """

    stored: HostWeight

    owns_weight: ClassVar[bool] = True

    @classmethod
    def of(cls, weight: Tensor, options: GEMMOptions) -> "HostGEMM":
        """Implement `choose_gemm`."""
        stored = stored_exactly(weight.detach())
        return cls(stored.codes, stored)

    def dense(self) -> Tensor:
        return rows_of(self.stored, torch.arange(self.stored.outputs))

    def rows(self, ids: Tensor) -> Tensor:
        return rows_of(self.stored, ids)

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        return multiply(self.stored, x, bias, out)
