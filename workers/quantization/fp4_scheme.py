"""4-bit floats (e2m1) of a checkpoint: codes, a scale per block of inputs, and perhaps a scale of the whole matrix.

MXFP4: OCP Microscaling Formats 1.0; blocks of 32, scales of powers of two (e8m0).
NVFP4: blocks of 16, scales in float8_e4m3fn, a float32 scale of the matrix.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.kernels.packed.weight import Code
from aerie.workers.layers.linear_method import Part
from aerie.workers.layers.weighted import WrongTensorError, check_shape
from aerie.workers.quantization.packed_scheme import MatrixCodes, PackedScheme

_E8M0_NAN = 255
_CODE_DEVIATION = 2.9  # standard deviation of uniformly distributed e2m1 codes


@dataclass(frozen=True)
class Fp4Scheme(PackedScheme):
    """The tensors of a matrix [rows, columns]; values are the last components of their names.

    codes: uint8, two inputs per byte, lower bits first: [rows, columns / 2], or blocks [rows, columns / 32, 16].
    scales: [rows, columns / group]: uint8 for e8m0, or float8_e4m3fn.
    group: 32, or 16.
    matrix_scale: float32, one number; "" for none.
    divides: whether weights are divided by `matrix_scale` instead of multiplied.
    unused: tensors needed only for 4-bit activations.
    """

    codes: str
    scales: str
    group: int
    matrix_scale: str = ""
    divides: bool = False
    unused: tuple[str, ...] = ()

    @property
    def code(self) -> Code:  # type: ignore[override]
        return "e2m1"

    @property
    def kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.codes, self.scales, *((self.matrix_scale,) if self.matrix_scale else ()))

    @property
    def has_row_scale(self) -> bool:  # type: ignore[override]
        return bool(self.matrix_scale)

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.matrix_scale else torch.uint8

    def storage(self, part: Part) -> dict[str, Tensor]:
        if part.columns.total % self.group:
            raise ValueError(
                f"{part.name or 'a layer'}: {part.columns.total} inputs are not whole blocks of {self.group}; "
                "use the checkpoint in bf16"
            )
        rows, columns = part.rows.size, self.widened(part.columns).size
        stored = {
            self.codes: torch.empty(rows, columns // 2, dtype=torch.uint8),
            self.scales: torch.empty(rows, columns // self.group, dtype=self.scale_dtype),
        }
        if self.matrix_scale:
            stored[self.matrix_scale] = torch.empty(1, dtype=torch.float32)
        return stored

    def copy(self, kind: str, part: Part, full: Tensor, out: Tensor) -> None:
        if kind == self.matrix_scale:
            if full.numel() != 1 or full.dtype != torch.float32:
                raise WrongTensorError(f"is {full.dtype} {list(full.shape)}, not one float32")
            out.copy_(full.reshape(1))
            return
        wanted, step = (torch.uint8, 2) if kind == self.codes else (self.scale_dtype, self.group)
        if full.dtype != wanted:
            raise WrongTensorError(f"is {full.dtype}, not {wanted}, which config.json's quantization_config implies")
        full = full.flatten(1) if kind == self.codes and full.dim() == 3 else full
        check_shape(full, (part.rows.total, part.columns.total // step))
        columns = self.widened(part.columns)
        out.copy_(full[part.rows.first : part.rows.end, columns.first // step : columns.end // step])

    def read(self, stored: Mapping[str, Tensor]) -> MatrixCodes:
        pairs, scales = stored[self.codes], stored[self.scales]
        codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
        if not self.matrix_scale:
            return MatrixCodes(codes, _powers_of_two(scales))
        scale = stored[self.matrix_scale]
        row_scale = (1.0 / scale if self.divides else scale).expand(codes.shape[0])
        return MatrixCodes(codes, scales.to(torch.bfloat16), None, row_scale)

    def dummy(self, stored: Mapping[str, Tensor], fan_in: int, generator: torch.Generator) -> None:
        stored[self.codes].random_(0, 256, generator=generator)
        wanted = fan_in**-0.5 / _CODE_DEVIATION
        if self.matrix_scale:
            stored[self.scales].fill_(1.0)
            stored[self.matrix_scale].fill_(1.0 / wanted if self.divides else wanted)
        else:
            stored[self.scales].fill_(127 + round(torch.log2(torch.tensor(wanted)).item()))


def _powers_of_two(exponents: Tensor) -> Tensor:
    """Convert e8m0 numbers to bfloat16, which is exact: the exponents are the same, except 2^-127, which is denormal.
    Raises ValueError for a NaN."""
    if bool((exponents == _E8M0_NAN).any()):
        raise ValueError("a scale of MXFP4 is NaN (255); download the checkpoint again")
    bits = torch.where(exponents == 0, 0x40, exponents.to(torch.int16) << 7)
    return bits.to(torch.int16).view(torch.bfloat16)
