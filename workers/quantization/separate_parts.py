"""A layer whose matrices have different quantisations, or of which only some are quantised: each has its own method."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from aerie.kernels.fp8.rows import Fp8Rows
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.workers.layers.linear_method import LinearMethod, LinearShape, Part


class SeparateParts(LinearMethod):
    """methods: one per part of `shape`, each for a shape with that part alone."""

    def __init__(self, shape: LinearShape, methods: Sequence[LinearMethod]) -> None:
        super().__init__(shape)
        assert not shape.padding, "a vocabulary head has one part"
        self.methods = nn.ModuleList(methods)
        self.kinds = tuple(dict.fromkeys(kind for method in methods for kind in method.kinds))

    @property
    def format(self) -> str:
        return " and ".join(dict.fromkeys(self._of(part)[0].format for part in self.shape.parts))

    def num_bytes(self, options: GEMMOptions) -> int:
        return sum(self._of(part)[0].num_bytes(options) for part in self.shape.parts)

    def _of(self, part: Part) -> tuple[LinearMethod, Part]:
        method = self.methods[self.shape.parts.index(part)]
        assert isinstance(method, LinearMethod)
        return method, method.shape.parts[0]

    def kinds_of(self, part: Part) -> tuple[str, ...]:
        method, own = self._of(part)
        return method.kinds_of(own)

    @property
    def dtype(self) -> torch.dtype:
        return self._of(self.shape.parts[0])[0].dtype

    def load(self, kind: str, part: Part, full: Tensor) -> None:
        method, own = self._of(part)
        method.load(kind, own, full)

    def fill_missing(self, kind: str, part: Part) -> bool:
        method, own = self._of(part)
        return method.fill_missing(kind, own)

    def fill_dummy(self, generator: torch.Generator) -> None:
        for part in self.shape.parts:
            self._of(part)[0].fill_dummy(generator)

    def finish(self, options: GEMMOptions) -> None:
        for part in self.shape.parts:
            self._of(part)[0].finish(options)

    def multiply(self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        products = []
        for part in self.shape.parts:
            own = None if bias is None else bias[part.offset : part.offset + part.rows.size]
            products.append(self._of(part)[0].multiply(x, own))
        return torch.cat(products, 1) if out is None else torch.cat(products, 1, out=out)
