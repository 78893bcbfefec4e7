"""y = x W^T + b, the one product that every layer is made of, and the two cases in which a library's is too slow.

On a CPU, oneDNN multiplies few rows by a weight in its own blocked layout 1.6 times faster than MKL does by a plain
one (float32, 1792 x 512, 4 rows: 0.54 against 0.88 ms on one core of a Xeon at 2.1 GHz, torch 2.13), so weights are
packed once after loading. These operators are what torch.compile uses for frozen weights on a CPU. On a GPU the few
rows of a round go through kernels of ours (`workers.layers.kernels.skinny_gemm`).
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from workers.layers.kernels.skinny_gemm import Workspace

_ROWS_HINT = 4  # the row count oneDNN chooses its layout for: a round's


class _Library:
    """torch's product. Base of the faster ones."""

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        if out is None:
            return F.linear(x, weight, bias)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)

    def multiply_gated(self, x: Tensor, weight: Tensor) -> Tensor:
        return _swiglu(self.multiply(x, weight, None, None))


@dataclass(frozen=True)
class _Blocked(_Library):
    """A second copy of the weight in oneDNN's layout."""

    weight: Tensor

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        assert out is None, "on a CPU nobody gives one"
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, bias, "none", [], "")
        return y


@dataclass(frozen=True)
class _FixedRows(_Library):
    """A kernel of ours for any number of rows, a row's bits being a function of that row alone."""

    workspace: "Workspace"

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        from workers.layers.kernels.skinny_gemm import fixed_rows

        return fixed_rows(x, weight, bias, self.workspace, out)


@dataclass(frozen=True)
class _FewRows(_Library):
    """Kernels of ours for as many rows as they have tiles for."""

    workspace: "Workspace"

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        from workers.layers.kernels.skinny_gemm import skinny_gemm, skinny_gemm_tiles

        tiles = skinny_gemm_tiles(x.shape[0], *weight.shape)
        if tiles is None:
            return super().multiply(x, weight, bias, out)
        return skinny_gemm(x, weight, bias, self.workspace, tiles, out)

    def multiply_gated(self, x: Tensor, weight: Tensor) -> Tensor:
        from workers.layers.kernels.skinny_gemm import gated_tiles, skinny_gemm_gated

        tiles = gated_tiles(x.shape[0], *weight.shape)
        if tiles is None:
            return super().multiply_gated(x, weight)
        return skinny_gemm_gated(x, weight, self.workspace, tiles)


def _swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [rows, size] of both side by side [rows, 2 * size]."""
    if gate_up.is_cuda:
        from workers.layers.kernels.norm_activation import silu_mul

        return silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


_LIBRARY = _Library()


class Multiplies(nn.Module):
    """A module that multiplies by its weight [out, in]."""

    def __init__(self) -> None:
        super().__init__()
        self._by = _LIBRARY

    @abstractmethod
    def product_weight(self) -> Tensor:
        """[out, in]"""

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """[rows, out] for x [rows, in]; in the memory `out` if it is given."""
        return self._by.multiply(x, self.product_weight(), bias, out)

    def multiply_gated(self, x: Tensor) -> Tensor:
        """[rows, out / 2], silu of the first half of the outputs times the second, for x [rows, in]."""
        return self._by.multiply_gated(x, self.product_weight())

    def prepare(self, workspace: "Workspace | None", deterministic: bool = False) -> None:
        """Once the weight is final: choose how to multiply by it. workspace: on GPUs, of `pack_all`. deterministic: see
        there. What another model shares, and has prepared, stays as it is."""
        if self._by is not _LIBRARY:
            return
        weight = self.product_weight()
        if workspace is not None:
            from workers.layers.kernels.skinny_gemm import skinny_gemm_tiles

            fits = skinny_gemm_tiles(1, *weight.shape) is not None
            assert fits or not deterministic, "refused at start"
            if fits:
                self._by = _FixedRows(workspace) if deterministic else _FewRows(workspace)
        elif weight.device.type == "cpu" and weight.dtype == torch.float32 and torch._C._has_mkldnn:
            self._by = _Blocked(torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT))


class Product(Multiplies):
    """A weight [out, in] and perhaps a bias [out]."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def product_weight(self) -> Tensor:
        return self.weight


def pack_all(model: nn.Module, deterministic: bool = False) -> None:
    """Prepare every product in `model`, whose weights are final. deterministic: on a GPU, a row's result must not
    depend on the others (weights of a 16-bit type, inputs a multiple of 128)."""
    modules = [m for m in model.modules() if isinstance(m, Multiplies)]
    workspace, weight = None, modules[0].product_weight()
    if weight.is_cuda and weight.itemsize == 2:
        from workers.layers.kernels.skinny_gemm import Workspace

        shapes = [(m.product_weight().shape[0], m.product_weight().shape[1]) for m in modules]
        workspace = Workspace.create(shapes, weight.device)
    for module in modules:
        module.prepare(workspace, deterministic and workspace is not None)
