"""What the methods of layers with adapters have in common: the weight is that of the layer's own method."""

import torch

from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.workers.layers.weighted import WeightMethod


class AdaptedWeight(WeightMethod):
    """Leaves loading, finishing and reloading of a weight to `inner`, the layer's own method."""

    inner: WeightMethod

    @property
    def format(self) -> str:
        return self.inner.format

    @property
    def reload_fault(self) -> str:
        return self.inner.reload_fault

    def fill_dummy(self, generator: torch.Generator) -> None:
        self.inner.fill_dummy(generator)

    def workspace_size(self) -> tuple[int, int]:
        return self.inner.workspace_size()

    def finish(self, options: GEMMOptions) -> None:
        self.inner.finish(options)

    def reopen(self) -> None:
        self.inner.reopen()

    def reloaded(self) -> None:
        self.inner.reloaded()
