"""The tensors of a matrix of 4- or 8-bit integers that a rank keeps until they are packed."""

import torch
from torch import Tensor, nn

from aerie.workers.layers.linear_method import Part
from aerie.workers.quantization.integers.format import IntFormat
from aerie.workers.quantization.packed_linear import StoredMatrix

_DEVIATION = {4: 4.61, 8: 73.9}  # standard deviation of uniformly distributed codes, by bits


class StoredInt(StoredMatrix):
    """tensors: this rank's share, by kind; with a leading dimension for experts if `num_experts` is given.

    Scales stay in the checkpoint's dtype, which is known once they are loaded.
    """

    def __init__(self, layout: IntFormat, part: Part, num_experts: int | None = None) -> None:
        super().__init__()
        self.layout, self.part = layout, part
        self._shares = layout.tensors(part)
        leading = () if num_experts is None else (num_experts,)
        self.tensors = nn.ParameterDict(
            {
                kind: nn.Parameter(torch.empty(*leading, *share.shape(part), dtype=share.dtype), requires_grad=False)
                for kind, share in self._shares.items()
            }
        )

    def load(self, kind: str, full: Tensor, expert: int | None = None) -> None:
        """Copy this rank's share of the checkpoint's tensor. Raises WrongTensorError for a wrong shape, dtype or order
        of inputs."""
        if kind in self.layout.optional:
            self.layout.check_values(kind, full, self.part)
            return
        share, parameter = self._shares[kind], self.tensors[kind]
        mine = share.cut(full, self.part)
        if share.outputs is None:
            self.layout.check_values(kind, full, self.part)
        if share.dtype is None and parameter.dtype != full.dtype:
            both = full.dtype if not expert else torch.promote_types(parameter.dtype, full.dtype)
            parameter.data = parameter.data.to(both)
        (parameter.data if expert is None else parameter.data[expert]).copy_(mine)

    def fill_dummy(self, generator: torch.Generator) -> None:
        """Fill with random codes for which outputs are as large as inputs."""
        columns = self.part.columns
        for kind, share in self._shares.items():
            tensor = self.tensors[kind].data
            if share.outputs is None:
                inputs = torch.arange(columns.first, columns.end, device=tensor.device)
                tensor.copy_(inputs // (self.layout.group or columns.total))
            else:
                fill_dummy(self.layout, kind, tensor, columns.total, generator)

    def matrix(self, expert: int | None = None) -> dict[str, Tensor]:
        """Return the tensors of the matrix, or of an expert's."""
        return {kind: tensor.data if expert is None else tensor.data[expert] for kind, tensor in self.tensors.items()}


def fill_dummy(layout: IntFormat, kind: str, tensor: Tensor, fan_in: int, generator: torch.Generator) -> None:
    """Fill one tensor of a matrix with random numbers for which outputs are as large as inputs."""
    if tensor.is_floating_point():
        tensor.fill_(fan_in**-0.5 / _DEVIATION[layout.bits])
    elif kind == layout.zeros_kind:
        tensor.fill_(layout.symmetric_word())
    else:
        limits = torch.iinfo(tensor.dtype)
        tensor.random_(limits.min, limits.max, generator=generator)
