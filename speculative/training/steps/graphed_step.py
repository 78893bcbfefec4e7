"""Replays a training step from CUDA graphs. Used by `speculative.training.trainer`."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class GraphedStep:
    """One step's loss and gradients, replayed from a CUDA graph for each batch shape. A small model's step is a
    thousand short kernels, and launching them takes several times longer than running them.

    All graphs write the same gradients and share one memory pool, so only the last replay's results are valid. The loss
    may neither read values back to the host nor branch on them.
    """

    def __init__(self, model: nn.Module, compute_loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]) -> None:
        self.model, self.compute_loss = model, compute_loss
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.gradients = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.captured: dict[tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, inputs: dict[str, Tensor]) -> Tensor:
        """The scalar loss; the parameters' `grad` are this batch's alone."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient  # the Trainer sets it to None after each step
        shapes = tuple(tensor.shape for tensor in inputs.values())
        if shapes not in self.captured:
            self.captured[shapes] = self._capture(inputs)
        graph, static, loss = self.captured[shapes]
        for name, tensor in inputs.items():
            static[name].copy_(tensor)
        graph.replay()
        return loss.clone()

    def _capture(self, inputs: dict[str, Tensor]) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Tensor]:
        static = {name: tensor.clone() for name, tensor in inputs.items()}
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # a capture may not load kernels or plan library calls
                self._run(static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            loss = self._run(static)
        return graph, static, loss

    def _run(self, static: dict[str, Tensor]) -> Tensor:
        torch._foreach_zero_(self.gradients)
        loss = self.compute_loss(self.model, static)
        torch.autograd.backward(loss)
        return loss.detach()
