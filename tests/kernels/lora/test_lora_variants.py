"""Numbers of rows and adapters compile nothing new: each LoRA kernel has three variants for a layer, and a product that
adds adapters one for each of its tiles."""

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from aerie.kernels.gemm import skinny_triton  # noqa: E402
from aerie.kernels.gemm.tiles import INPUT_STEP  # noqa: E402
from aerie.kernels.gemm.workspace import Workspace  # noqa: E402
from aerie.kernels.lora import embedding_triton, product_triton  # noqa: E402
from aerie.kernels.lora.product import VARIANT_ROWS, LoraTables, RowAdapters  # noqa: E402

# inputs, and borders of the stacked matrices' outputs: Llama-3.1-8B's, a recurrent layer's of Qwen3-Next, small ones
LAYERS = (
    (4096, (0, 4096, 5120, 6144)),
    (4096, (0, 4096)),
    (4096, (0, 14336, 28672)),
    (14336, (0, 4096)),
    (2048, (0, 2048, 4096, 8192, 12288, 12320, 12352)),
    (64, (0, 64, 96, 128)),
    (136, (0, 72)),
    (4096, (0, 32_064)),  # a quarter of its vocabulary
)
ROWS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 66, 100, 128, 129, 200, 256, 500, 512, 777, 1024)
MANY_ROWS = (1500, 2048, 4095, 4096, 8192)


class Recorded:
    """Stands in for a kernel: notes what Triton would compile a variant for."""

    def __init__(self, kernel: Any, variants: set[tuple[Any, ...]]) -> None:
        self._kernel, self._variants = kernel, variants

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(0 < size < 1 << 16 for size in grid[1:]) and grid[0] > 0

        def launch(*arguments: Any, **options: Any) -> None:
            params = self._kernel.params
            given = dict(zip((p.name for p in params), arguments, strict=False)) | options
            key: list[Any] = [self._kernel.fn.__name__]
            for param in params:
                value = given.pop(param.name)
                if param.is_constexpr:
                    key.append((param.name, value))
                elif value is None or isinstance(value, TensorDescriptor):
                    key.append((param.name, None if value is None else tuple(value.block_shape)))
                    continue
                elif isinstance(value, torch.Tensor):
                    key.append((param.name, value.dtype, value.data_ptr() % 16 == 0))
                elif not param.do_not_specialize:
                    key.append((param.name, value == 1, value % 16 == 0))
                assert param.is_constexpr or isinstance(value, torch.Tensor) or abs(value) < 1 << 31
            self._variants.add((*key, *sorted(given.items())))

        return launch


def variants_of(rows: int, inputs: int, parts: tuple[int, ...], rank: int, places: int) -> set[tuple[Any, ...]]:
    """Return what launching the kernels compiles. Rows are those of a wider tensor for an odd number."""
    found: set[tuple[Any, ...]] = set()
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (product_triton, "_lora_shrink"),
            (product_triton, "_lora_expand"),
            (skinny_triton, "_skinny_gemm"),
        ):
            patch.setattr(module, name, Recorded(getattr(module, name), found))
        down = torch.empty(places, (len(parts) - 1) * rank, inputs, dtype=torch.bfloat16)
        tables = LoraTables(down, torch.empty(places, parts[-1], rank, dtype=torch.bfloat16), parts)
        x = torch.empty(rows, inputs, dtype=torch.bfloat16)
        y = torch.empty(rows, parts[-1], dtype=torch.bfloat16)
        lora_indices = torch.empty(rows, dtype=torch.int32)
        product_triton.add_lora(y, x, tables, lora_indices)
        if inputs % INPUT_STEP == 0:
            weight = torch.empty(parts[-1], inputs, dtype=torch.bfloat16)
            gemm = skinny_triton.SkinnyGEMM(weight, Workspace.allocate(0, 0, weight.device))
            adapters = RowAdapters(tables, lora_indices, torch.empty(7, 4, dtype=torch.int32)[rows % 7])
            for gated in (False, True):
                gemm.multiply_adapted(x, None, None, adapters, gated)
    return found


@pytest.mark.parametrize(("inputs", "parts"), LAYERS)
@pytest.mark.parametrize("rank", [16, 48, 64, 256])
def test_a_step_compiles_nothing_that_the_start_has_not(inputs: int, parts: tuple[int, ...], rank: int) -> None:
    """The tables have the engine's places and its maximum rank: loading an adapter changes neither."""
    for places in (1, 2, 4, 8, 32):
        ahead = set().union(*(variants_of(rows, inputs, parts, rank, places) for rows in VARIANT_ROWS))
        counts = ROWS if places > 4 else (*ROWS, *MANY_ROWS)
        for rows in counts:
            assert variants_of(rows, inputs, parts, rank, places) <= ahead, (rows, places)
        names = [key[0] for key in ahead]
        assert {names.count("_lora_shrink"), names.count("_lora_expand")} <= {2, 3}
        served, is_gated = inputs % INPUT_STEP == 0 and not any(border % 64 for border in parts), len(parts) == 3
        assert names.count("_skinny_gemm") == served * 3 * (1 + is_gated)


def test_all_numbers_of_places_up_to_8_share_the_kernels() -> None:
    for (inputs, parts), rows in itertools.product(LAYERS, VARIANT_ROWS):
        assert len({frozenset(variants_of(rows, inputs, parts, 16, places)) for places in (1, 3, 4, 8)}) == 1


def test_an_embedding_has_one_kernel_for_columns_and_three_for_products() -> None:
    def launched(counts: tuple[int, ...], places: int) -> set[tuple[Any, ...]]:
        found: set[tuple[Any, ...]] = set()
        down, up = (torch.empty(places, *size, dtype=torch.bfloat16) for size in ((48, 32_064), (4096, 48)))
        with pytest.MonkeyPatch.context() as patch:
            for module, name in ((embedding_triton, "_lora_columns"), (product_triton, "_lora_expand")):
                patch.setattr(module, name, Recorded(getattr(module, name), found))
            for rows in counts:
                y, ids = torch.empty(rows, 4096, dtype=torch.bfloat16), torch.empty(rows, dtype=torch.int64)
                tables, indices = LoraTables(down, up, (0, 4096)), torch.empty(rows, dtype=torch.int32)
                embedding_triton.add_lora_embedding(y, ids, tables, indices)
        return found

    for places in (1, 8, 32):
        ahead = launched(VARIANT_ROWS, places)
        assert sorted(key[0] for key in ahead) == ["_lora_columns", *["_lora_expand"] * 3]
        assert launched((*ROWS, *MANY_ROWS), places) <= ahead
