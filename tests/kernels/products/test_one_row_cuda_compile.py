"""Where the CUDA kernels of one row are chosen, and what NVRTC makes of them for Hopper. Needs no GPU."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aerie.kernels import cuda_source
from aerie.kernels.capability import Capability
from aerie.kernels.experts.gated import GPT_OSS
from aerie.kernels.experts.route import RouterLogits, Routing
from aerie.kernels.experts.weights import ExpertSizes
from aerie.kernels.gemm import choice
from aerie.kernels.gemm.tiles import SHARED_BYTES, one_row_bytes
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace
from aerie.kernels.packed import experts as packed_experts
from aerie.kernels.packed.cuda.gated_mlp_tiles import one_row_tiles
from aerie.kernels.packed.experts import PackedExpertWeights, packed_expert_products
from aerie.kernels.packed.weight import empty
from tests.kernels.delta_rule.test_few_rows_cuda import HOPPER, nvrtc_here
from tests.support.kernels.cuobjdump import dumped

BLOCKS = 132
WITH_COMPILER = Capability("cuda", HOPPER, frozenset({"triton", "nvrtc"}))
WITHOUT = Capability("cuda", HOPPER, frozenset({"triton"}))


def sizes(size: int, width: int, experts: int = 32, slots: int = 4) -> ExpertSizes:
    return ExpertSizes(experts, 0, slots, size, width, 64)


@pytest.mark.parametrize("blocks", [114, 132])
@pytest.mark.parametrize("experts", [32, 128])
def test_experts_of_gpt_oss_fit_the_shared_memory_of_hopper(blocks: int, experts: int) -> None:
    tiles = one_row_tiles(sizes(2880, 2880, experts), blocks)
    assert tiles is not None and tiles.unit == 3 and tiles.shared_bytes <= SHARED_BYTES
    # of 45 tiles by 15 units of 4 experts, each block has at most its share, rounded up
    assert tiles.down_units == -(-45 * 60 // blocks) and tiles.down_units <= tiles.rings * tiles.depth


@pytest.mark.parametrize(
    "size,width",
    [
        (2880, 1472),  # half of an expert: 23 chunks have no units
        (2880, 96),  # not a multiple of 64
        (512, 256),  # one expert has fewer units than there are blocks
        (7168, 2048),  # a block would have parts of a row that its threads do not copy
        (4096, 8192),  # down units exceed shared memory
    ],
)
def test_other_experts_are_left_to_triton(size: int, width: int) -> None:
    assert one_row_tiles(sizes(size, width), BLOCKS) is None


def test_the_table_of_experts_has_cuda_where_it_compiles() -> None:
    names = [[each.name for each in packed_expert_products.serving(here)] for here in (WITH_COMPILER, WITHOUT)]
    assert names == [["cuda", "triton"], ["triton"]]


def test_experts_are_served_with_a_workspace_that_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made for the multiprocessors of an H200; a part of a GPU may need more of it."""
    monkeypatch.setattr(packed_experts, "num_multiprocessors", lambda device: BLOCKS)
    tiles = one_row_tiles(sizes(2880, 2880, 4), BLOCKS)
    assert tiles is not None
    cpu = torch.device("cpu")
    gate_up, down = (empty(n, 2880, 32, "e2m1", cpu, torch.bfloat16, False, False, 4) for n in (5760, 2880))
    weights = PackedExpertWeights(gate_up, down, is_raised=True, has_moved_bits=True)
    x, router = torch.zeros(1, 2880, dtype=torch.bfloat16), RouterLogits(torch.zeros(1, 4), None, Routing(4, 4))
    row = next(each for each in packed_expert_products.implementations if each.name == "cuda")
    assert row.serves is not None
    cells, tickets = tiles.workspace
    for sizes_of, serves in (((cells, tickets), True), ((cells - 1, tickets), False), ((cells, tickets - 1), False)):
        options = GEMMOptions(Workspace.allocate(*sizes_of, cpu))
        assert row.serves(x, router, weights, options) == serves
    options = GEMMOptions(Workspace.allocate(cells, tickets, cpu))
    assert not row.serves(x.expand(2, -1), router, weights, options)
    assert not row.serves(x, router, replace(weights, has_moved_bits=False), options)
    assert not row.serves(x, router, weights, replace(options, deterministic=True))


def test_products_are_kept_in_shared_memory_if_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """qkv and o of gpt-oss fit, o of Llama-3.1-8B does not; neither 32-bit weights nor deterministic engines."""
    monkeypatch.setattr(choice, "num_multiprocessors", lambda device: BLOCKS)
    row = next(each for each in choice.choose_gemm.implementations if "one_row_cuda" in each.target)
    assert row.serves is not None and row.needs(WITH_COMPILER) and not row.needs(WITHOUT)
    options = GEMMOptions(Workspace.allocate(1, 1, torch.device("cpu")))

    def serves(n: int, k: int, options: GEMMOptions = options, dtype: torch.dtype = torch.bfloat16) -> bool:
        assert row.serves is not None
        return row.serves(torch.empty(n, k, dtype=dtype, device="meta"), options)

    assert serves(5120, 2880) and serves(2880, 4096)
    assert not serves(4096, 4096) and not serves(32, 2880) and not serves(5120, 2880, GEMMOptions())
    assert not serves(2880, 1024, dtype=torch.float32)
    assert not serves(5120, 2880, GEMMOptions(options.workspace, deterministic=True))


@pytest.mark.skipif(nvrtc_here() is None, reason="needs the wheel nvidia-cuda-nvrtc")
@pytest.mark.parametrize("kernel", ["one_row", "one_row_experts"])
def test_kernels_of_one_row_fit_hopper(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is spilled. Before the wait the experts read nothing, and the product W and the bias: the compiler moves
    reads by pointers that are `const __restrict__` before it."""
    pytest.importorskip("triton", reason="triton's kernels choose the experts")
    from aerie.kernels.gemm import one_row_cuda
    from aerie.kernels.packed.cuda import gated_mlp_cuda

    monkeypatch.setattr(cuda_source, "nvrtc_path", nvrtc_here)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if kernel == "one_row":
        source, macros = one_row_cuda.source(), one_row_cuda.defines(5120, 2880, False, BLOCKS)
    else:
        tiles = one_row_tiles(sizes(2880, 2880), BLOCKS)
        assert tiles is not None
        source, macros = gated_mlp_cuda.experts_source(), tiles.defines(GPT_OSS)
    sass = dumped(cuda_source.compiled(source, macros, HOPPER), tmp_path)
    assert not re.search(r"\b(LDL|STL)\b", sass)
    before, _, after = sass.partition("ACQBULK")
    assert after and not re.search(r"\bSTG\b|\bRED|\bATOM", before)
    assert before.count("LDG") == (1 if kernel == "one_row" else 0), "the bias"
    assert ("UBLKCP" in before) == (kernel == "one_row")


def test_shared_memory_of_a_product_is_bounded() -> None:
    assert one_row_bytes(5120, 2880, BLOCKS) == 39 * (5760 + 16) + 5760 + 24
    assert one_row_bytes(5280, 2880, BLOCKS) is None and one_row_bytes(100, 2880, BLOCKS) is None
    assert one_row_bytes(5120, 2872, BLOCKS) is None, "not a multiple of 32"
