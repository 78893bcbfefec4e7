"""`GEMMOptions`: scratch memory and options shared by the GEMMs of a model on a device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.kernels.capability import Capability
from aerie.kernels.cpp_library import compiles
from aerie.kernels.gemm.blocks import largest
from aerie.kernels.gemm.tiles import ordered_workspace_size, workspace_size


@dataclass(frozen=True)
class Workspace:
    """Scratch memory for split sums, shared by GEMMs that run one after another on a stream.

    part: float32 partial sums.
    tickets: int32, zero between launches.
    """

    part: Tensor
    tickets: Tensor

    @staticmethod
    def create(shapes: Sequence[tuple[int, int]], device: torch.device) -> "Workspace":
        """Allocate a workspace for weights of these shapes [N, K]."""
        return Workspace.allocate(*workspace_size(shapes), device)

    @staticmethod
    def allocate(cells: int, tickets: int, device: torch.device) -> "Workspace":
        return Workspace(
            torch.empty(cells, dtype=torch.float32, device=device),
            torch.zeros(tickets, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class GEMMOptions:
    """What a layer's method must know to choose its kernels.

    workspace: shared by all layers of a 16-bit model on a GPU, else None.
    deterministic: a row's result must not depend on other rows (needs the workspace).
    fp8: whether the device multiplies FP8 (needs the workspace).
    packed: whether the device multiplies 4- and 8-bit weights (`aerie.kernels.packed`).
    host: whether the device is a CPU with kernels for float32 rows (`aerie.kernels.cpp_library`).
    adapted: whether adapters will change products, so that layers keep what passes with adapters multiply alone.
    """

    workspace: Workspace | None = None
    deterministic: bool = False
    fp8: bool = False
    packed: bool = False
    host: bool = False
    adapted: bool = False

    @staticmethod
    def of(
        shapes: Sequence[tuple[int, int]],
        others: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool,
    ) -> "GEMMOptions":
        """Return the options for the layers of a model, which run one after another on one stream.

        shapes: [N, K] of their weights.
        others: cells and tickets of the workspace that other operations need, such as FP8 products
            (`aerie.kernels.fp8.tiles.fp8_workspace_size`).
        """
        capability = Capability.of(device)
        if not capability.is_gpu or dtype.itemsize != 2:
            return GEMMOptions(packed=capability.is_gpu, host=dtype == torch.float32 and compiles(capability))
        sizes = [workspace_size(shapes), *others]
        if deterministic:
            sizes.append(ordered_workspace_size(shapes))
        workspace = Workspace.allocate(*largest(sizes), device)
        return GEMMOptions(workspace, deterministic, capability.multiplies_fp8, packed=True)
