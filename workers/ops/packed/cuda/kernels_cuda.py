"""Products with int4 weights by `few_rows.cu` (small-batch) and `wide.cu` (large-batch)."""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from attention.capability import Capability
from attention.ops.cuda_source import Kernel, load, tensor_map
from workers.ops.blocks import cdiv
from workers.ops.packed.cuda.tiles import STEP, FewRowsTiles, WideTiles
from workers.ops.packed.order_rows_triton import order_rows
from workers.ops.packed.weight import TILE, PackedWeight


@cache
def source_of(tiles: FewRowsTiles | WideTiles, half: bool) -> str:
    """Return the source of the kernel for these tiles, including the functions that both kernels use."""
    folder = Path(__file__).parent
    name, extra = ("few_rows.cu", "") if isinstance(tiles, FewRowsTiles) else ("wide.cu", _wgmma(tiles.block_m, half))
    return (folder / "packed.cuh").read_text() + extra + (folder / name).read_text()


def packed_cuda(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    tiles: FewRowsTiles | WideTiles,
    out: Tensor,
    gated: bool = False,
) -> Tensor:
    """Write x W^T + b to `out`; gated: silu(x G^T) * (x U^T), where W is G above U.

    x: [rows, in_features] bfloat16 or float16, last stride 1, rows at multiples of 16 bytes; with
        `FewRowsTiles` at most 8 * `tiles.row_tiles` rows.
    weight: int4 without `row_scale`, in_features a multiple of 128, groups a multiple of 128 or all inputs, scales in
        x's dtype.
    bias: [N] in x's dtype, or None.
    out: [rows, N] or [rows, N / 2] in x's dtype, contiguous.

    Reference: `workers.ops.packed.product.packed_product`.
    """
    (rows, n), k = out.shape, weight.in_features
    assert x.shape == (rows, k) and x.stride(1) == 1 and x.stride(0) % 8 == 0 and k % STEP == 0
    assert x.dtype == out.dtype == weight.scales.dtype and out.is_contiguous() and weight.code == "int4"
    assert weight.group == k or weight.group % STEP == 0
    assert weight.out_features == n * (1 + gated) and not (gated and (n % TILE or bias is not None))
    if rows == 0:
        return out
    grid = [cdiv(n, tiles.outputs // (1 + gated)), tiles.splits]
    inputs: list[object] = []
    if isinstance(tiles, FewRowsTiles):
        assert rows <= 8 * tiles.row_tiles
        inputs += [x, rows, x.stride(0)]
    else:
        ordered = order_rows(x)
        inputs += [tensor_map(ordered, TILE, tiles.block_m), rows]
        grid.append(cdiv(rows, tiles.block_m))
    _kernel(tiles, x.get_device(), gated, x.dtype == torch.float16, weight.zeros is not None).launch(
        grid,
        (1, tiles.splits),
        Capability.of(x.device).supports_pdl,
        *(*inputs, weight.codes, weight.scales, weight.zeros, bias, out, n),
        *(cdiv(weight.out_features, TILE), k // STEP, 0 if weight.group == k else weight.group // STEP),
    )
    return out


def _kernel(tiles: FewRowsTiles | WideTiles, device: int, gated: bool, half: bool, zeros: bool) -> Kernel:
    name, defines = ("few_rows" if isinstance(tiles, FewRowsTiles) else "wide"), tiles.defines(gated, half, zeros)
    return load(device, source_of(tiles, half), name, defines, tiles.threads, tiles.shared_bytes(zeros))


def _wgmma(rows: int, half: bool) -> str:
    """Return the device function `wgmma`, which adds the products of 16 inputs to 64 outputs by `rows` rows."""
    number, count = "f16" if half else "bf16", rows // 2
    sums = ", ".join(f"%{r}" for r in range(count))
    first = ", ".join(f"%{count + r}" for r in range(4))
    name = f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{number}.{number}"
    outputs = ", ".join(f'"+f"(d[{r}])' for r in range(count))
    inputs = ", ".join(f'"r"(a[{r}])' for r in range(4))
    head = f"__device__ __forceinline__ void wgmma(float (&d)[{count}], const u32 (&a)[4], u64 b)"
    code = f"{name} {{{sums}}}, {{{first}}}, %{count + 4}, 1, 1, 1, 0;"
    return f'{head} {{\n    asm volatile("{code}" : {outputs} : {inputs}, "l"(b));\n}}\n'
