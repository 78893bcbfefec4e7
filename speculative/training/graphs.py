"""One training step (loss and gradients), run eagerly or replayed from a CUDA graph per batch shape.

A small model's step is a thousand short kernels: launching them one by one takes several times longer than they run.
Batches from `collate(.., full_tokens=...)` come in few shapes, so each shape is captured once and replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from speculative.training.samples import Batch

LossOf = Callable[[Batch], Tensor]
# Runs before a capture: kernels are loaded and library plans made then, which a capture must not do.
_WARM_UP_RUNS = 2


@dataclass(frozen=True)
class CapturedStep:
    """A graph, the batch whose tensors it reads, and the scalar loss it writes."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    loss: Tensor


class EagerStep:
    """Computes a batch's loss and leaves its gradients in the model's parameters."""

    def __init__(self, model: nn.Module, loss_of: LossOf) -> None:
        self.model = model
        self.loss_of = loss_of

    def __call__(self, batch: Batch) -> Tensor:
        """The detached scalar loss; the parameters' `grad` are this batch's alone."""
        self.model.zero_grad(set_to_none=True)
        loss = self.loss_of(batch)
        torch.autograd.backward(loss)
        return loss.detach()


class GraphedStep:
    """The same as `EagerStep`, replayed. `loss_of` must neither read values back to the host nor branch on them.

    All graphs write the same `grad` tensors and share one memory pool, so only the last replay's results are valid.
    """

    def __init__(self, model: nn.Module, loss_of: LossOf) -> None:
        self.loss_of = loss_of
        self.gradients = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
                self.gradients.append(parameter.grad)
        self.captured: dict[tuple[torch.Size, ...], CapturedStep] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, batch: Batch) -> Tensor:
        """The scalar loss; the parameters' `grad` are this batch's alone."""
        shapes = tuple(tensor.shape for tensor in batch.tensors())
        if shapes not in self.captured:
            self.captured[shapes] = self._capture(batch)
        step = self.captured[shapes]
        for static, given in zip(step.batch.tensors(), batch.tensors(), strict=True):
            static.copy_(given)
        step.graph.replay()
        return step.loss.clone()

    def _capture(self, batch: Batch) -> CapturedStep:
        static = Batch(*(tensor.clone() for tensor in batch.tensors()))
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_RUNS):
                self._run(static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            loss = self._run(static)
        return CapturedStep(graph, static, loss)

    def _run(self, batch: Batch) -> Tensor:
        torch._foreach_zero_(self.gradients)
        loss = self.loss_of(batch)
        torch.autograd.backward(loss)
        return loss.detach()
