"""Cases of products with weights of few bits (tests/kernels/products has their formats and row counts)."""

from typing import Any

import torch

from aerie.kernels.experts.adapted.product import ExpertAdapters
from aerie.kernels.experts.gated import GELU_TANH, SWIGLU
from aerie.kernels.experts.route import RouterLogits, Routing
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace
from aerie.kernels.packed.adapted_experts import packed_adapted_experts
from aerie.kernels.packed.cuda.gated_mlp_tiles import gated_mlp_words
from aerie.kernels.packed.expert_tiles import packed_expert_tiles, partial_sizes
from aerie.kernels.packed.experts import PackedExpertWeights, packed_expert_products
from aerie.kernels.packed.product import PackedProduct, choose_product, gated_mlp
from aerie.kernels.packed.tiles import packed_workspace_size
from aerie.kernels.packed.weight import PackedWeight, pack
from tests.kernels.ops.case import Case
from tests.kernels.ops.lora_cases import expert_tables

SIZE, WIDTH, EXPERTS, SLOTS = 128, 64, 4, 2


def arguments(rows: int, device: torch.device) -> tuple[Any, ...]:
    """Rows in bfloat16 and experts of int4 in groups of 32."""
    generator = torch.Generator().manual_seed(rows)

    def matrix(n: int, k: int) -> PackedWeight:
        codes = torch.randint(0, 16, (EXPERTS, n, k), generator=generator).to(torch.uint8)
        scales = (0.5 + torch.rand(EXPERTS, n, k // 32, generator=generator)) * k**-0.5 / 3.5
        return pack(codes.to(device), scales.to(device, torch.bfloat16), None, None, 32, "int4")

    activation = GELU_TANH if rows == 3 else SWIGLU
    weights = PackedExpertWeights(matrix(2 * WIDTH, SIZE), matrix(SIZE, WIDTH), activation=activation)
    x = torch.randn(rows, SIZE, generator=generator).to(device, torch.bfloat16)
    logits = torch.randn(rows, EXPERTS, generator=generator).to(device)
    sizes = weights.sizes(SLOTS)
    cells, tickets = partial_sizes(rows, sizes, packed_expert_tiles(rows, sizes))
    workspace = Workspace.allocate(max(cells, 1), max(tickets, 64), device)
    router = RouterLogits(logits, None, Routing(EXPERTS, SLOTS, normalise=True))
    return x, router, weights, GEMMOptions(workspace)


def adapted_arguments(rows: int, device: torch.device) -> tuple[Any, ...]:
    """`arguments` with two adapters, and rows without."""
    x, router, weights, options = arguments(rows, device)
    gates = expert_tables(2, EXPERTS, 16, SIZE, (0, WIDTH, 2 * WIDTH), x.dtype, device)
    downs = expert_tables(2, EXPERTS, 16, WIDTH, (0, SIZE), x.dtype, device)
    index = (torch.arange(rows) % 3 - 1).int().to(device)
    return x, router, weights, ExpertAdapters(gates, downs, index), options


def mlp_arguments(rows: int, device: torch.device) -> tuple[Any, ...]:
    """Rows in bfloat16 and an MLP of int4 in groups of 128, of a size that the kernel for few rows serves."""
    generator = torch.Generator().manual_seed(rows)
    size, width = 2048, 512
    cells, tickets = packed_workspace_size([(2 * width, size), (size, width)])
    workspace = Workspace.allocate(cells, max(tickets, gated_mlp_words(size, width)), device)
    options = GEMMOptions(workspace if device.type == "cuda" else None, packed=True)

    def product(n: int, k: int) -> PackedProduct:
        codes = torch.randint(0, 16, (n, k), generator=generator).to(torch.uint8)
        scales = (0.5 + torch.rand(n, k // 128, generator=generator)) * k**-0.5 / 3.5
        return choose_product(
            pack(codes.to(device), scales.to(device, torch.bfloat16), None, None, 128, "int4"), options
        )

    gate_up, down = product(2 * width, size), product(size, width)
    x = torch.randn(rows, size, generator=generator).to(device, torch.bfloat16)
    return x, gate_up, down, options


def product_arguments(outputs: int, inputs: int, device: torch.device) -> tuple[PackedWeight, GEMMOptions]:
    """A weight of int4 in groups of 128, and a workspace for it."""
    generator = torch.Generator().manual_seed(outputs)
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator).to(torch.uint8)
    scales = (0.5 + torch.rand(outputs, inputs // 128, generator=generator)) * inputs**-0.5 / 3.5
    workspace = Workspace.allocate(*packed_workspace_size([(outputs, inputs)]), device)
    weight = pack(codes.to(device), scales.to(device, torch.bfloat16), None, None, 128, "int4")
    return weight, GEMMOptions(workspace, packed=True)


def products(arguments: tuple[PackedWeight, GEMMOptions], product: PackedProduct) -> list[torch.Tensor]:
    """Products of one, few and more rows."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for rows in (1, 5, 40):
        x = torch.randn(rows, arguments[0].in_features, generator=generator)
        x = x.to(arguments[0].codes.device, torch.bfloat16)
        found += [product.multiply(x, None), product.multiply_gated(x)]
    return found


CASES = (
    *(
        Case(
            choose_product,
            f"{n}x{k}",
            lambda device, n=n, k=k: product_arguments(n, k, device),
            seen=products,
            tolerance=2.0**-5,  # a gated product is rounded four times
            slow=n > 128,
        )
        for n, k in ((128, 128), (512, 1024))
    ),
    *(
        Case(packed_expert_products, f"{rows} rows", lambda device, rows=rows: arguments(rows, device), slow=rows > 3)
        for rows in (3, 20)
    ),
    *(
        Case(
            packed_adapted_experts,
            f"{rows} rows",
            lambda device, rows=rows: adapted_arguments(rows, device),
            tolerance=2.0**-5,  # rounded before the activation and after it, and twice at the end
        )
        for rows in (3, 20)
    ),
    *(Case(gated_mlp, f"{rows} rows", lambda device, rows=rows: mlp_arguments(rows, device)) for rows in (1, 3)),
)
