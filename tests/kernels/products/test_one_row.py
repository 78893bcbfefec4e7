"""What serves few rows of mixtures of experts: inputs that are a multiple of 64, codes with moved bits, a program per
expert, one launch of norm and routing. On a GPU or under Triton's interpreter (TRITON_INTERPRET=1)."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.kernels.experts.norm_route import Norm  # noqa: E402
from aerie.kernels.experts.route import RouterLogits, Routing  # noqa: E402
from aerie.kernels.experts.route_triton import route  # noqa: E402
from aerie.kernels.experts.weights import few_row_tiles  # noqa: E402
from aerie.kernels.gemm.skinny_triton import skinny_gemm, skinny_gemm_gated  # noqa: E402
from aerie.kernels.gemm.tiles import gated_tiles, skinny_gemm_tiles  # noqa: E402
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace  # noqa: E402
from aerie.kernels.packed import experts_triton  # noqa: E402
from aerie.kernels.packed.decode_ptx import decode_asm  # noqa: E402
from aerie.kernels.packed.expert_tiles import PackedExpertTiles, PackedTiles  # noqa: E402
from aerie.kernels.packed.experts import with_moved_bits  # noqa: E402
from aerie.workers.distributed.tp_group import SOLO  # noqa: E402
from aerie.workers.layers.moe import MixtureOfExperts  # noqa: E402
from aerie.workers.layers.norm import RMSNorm  # noqa: E402
from aerie.workers.layers.weighted import WeightedModule  # noqa: E402
from tests.kernels.products import test_expert_kernels as experts  # noqa: E402
from tests.kernels.products import test_packed_experts as few_bits  # noqa: E402
from tests.support.kernels.triton_interpreter import DEVICE, INTERPRETED, MARKS  # noqa: E402

pytestmark = MARKS
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter's bfloat16 is slow
ERROR = 3e-4 if INTERPRETED else 2.5e-3  # of one rounding: 1.7e-3 in the mean


@pytest.mark.parametrize(
    "n,k",
    [(70, 192), (8466, 320)] if INTERPRETED else [(5120, 2880), (201088, 2880), (12352, 2048), (17000, 320), (70, 192)],
)
@pytest.mark.parametrize("bias", [False, True])
def test_inputs_may_be_a_multiple_of_64(n: int, k: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(n)
    workspace = Workspace.create([(n, k)], DEVICE)
    weight = torch.randn(n, k, generator=generator).to(DEVICE, DTYPE)
    b = torch.randn(n, generator=generator).to(DEVICE, DTYPE) if bias else None
    for rows in (1, 17, 64):
        # NaN after each row: what lies past the inputs must not be read
        x = torch.full((rows, 2 * k), torch.nan)
        x[:, :k] = torch.randn(rows, k, generator=generator)
        x = x.to(DEVICE, DTYPE)[:, :k]
        tiles = skinny_gemm_tiles(rows, n, k)
        assert tiles is not None
        out = skinny_gemm(x, weight, b, workspace, tiles)
        expected = x.double() @ weight.double().T + (0.0 if b is None else b.double())
        assert float((out.double() - expected).norm() / expected.norm()) < ERROR
        gated = gated_tiles(rows, n // 2, k)
        if gated is not None and not bias and n % 128 == 0:
            pair = skinny_gemm_gated(x / k**0.5, weight, workspace, gated)
            assert bool(pair.isfinite().all())


def run_ptx(lines: str, registers: dict[str, int]) -> dict[str, int]:
    """Run shifts, masks and moves of PTX on 32-bit words."""
    body = lines.replace("{", " ").replace("}", " ")
    for line in body.split(";"):
        words = line.replace(",", " ").split()
        if not words or words[0].startswith("."):
            continue
        name, target, *rest = words
        a, *others = (registers[each] if each in registers else int(each, 0) for each in rest)
        if name == "shl.b32":
            result = a << others[0]
        elif name == "shr.u32":
            result = a >> others[0]
        elif name == "and.b32":
            result = a & others[0]
        elif name == "mov.b32":
            result = a
        else:
            assert name == "lop3.b32" and others[2] == 0xEA, line
            result = (a & others[0]) | others[1]
        registers[target] = result & 0xFFFFFFFF
    return registers


def test_moved_codes_are_decoded_by_their_ptx() -> None:
    """All codes in all places give what the instructions for codes as stored give."""
    import triton.language as tl

    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(1 << 31), 1 << 31, (1, 600), generator=generator).to(torch.int32)
    placed = with_moved_bits(words)
    new, old = (
        [decode_asm.fn(0, half, code, False, None, tl.bfloat16) for half in range(2)]
        for code in ("e2m1 moved", "e2m1 / 2^126")
    )
    for column in range(0, words.shape[1], 4):
        for half in range(2):
            found, expected = (
                run_ptx(
                    asm[half],
                    {f"${8 + i}": int(stored[0, column + i]) & 0xFFFFFFFF for i in range(4)},
                )
                for asm, stored in ((new, placed), (old, words))
            )
            assert all(found[f"${i}"] == expected[f"${i}"] for i in range(8))


@pytest.mark.parametrize("rows", [1, 3, 17] if INTERPRETED else [1, 2, 3, 8, 9, 17, 64, 200])
def test_moved_codes_are_multiplied(rows: int) -> None:
    few_bits.check(few_bits.weights_of("mxfp4", 3 if INTERPRETED else 8, gpt_oss=True), rows)


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"] if INTERPRETED else list(few_bits.KINDS))
@pytest.mark.parametrize("warps_k,splits,down_warps", [(2, 2, 8), (4, 3, 4)])
def test_fine_programs_are_right(
    kind: str, warps_k: int, splits: int, down_warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More warps than accumulators; more programs than experts, of which some have none."""
    tiles = PackedExpertTiles(
        PackedTiles(1, 2, warps_k, splits=splits), PackedTiles(1, 1, down_warps, splits=2 * splits)
    )
    for module in (experts_triton, few_bits):
        monkeypatch.setattr(module, "packed_expert_tiles", lambda *_: tiles)
    few_bits.check(few_bits.weights_of(kind, 3, gpt_oss=kind == "mxfp4"), 1)


@pytest.mark.parametrize("kind,ahead", [("half", True), ("group", False)])
def test_experts_of_one_row_have_a_program_each(kind: str, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """16-bit weights are read ahead; widths that are no power of two are not. A padding row has no experts."""
    if not ahead:
        monkeypatch.setattr(experts, "SIZES", (256, 384))
    weights, _, _ = experts.weights_of(kind, 13, 1, 0)
    tiles = few_row_tiles(1, weights.sizes(4))
    assert tiles.down.ahead == ahead and tiles.down.splits == 4
    for seed in range(2):
        experts.check(kind, experts.few(tiles), 1, seed, list_used=True)
    x, _ = experts.rows_for(weights, 1, torch.Generator().manual_seed(1))
    padding = experts.token_slots(torch.zeros(1) > 0)
    logits = RouterLogits(torch.zeros(1, 12, device=DEVICE), torch.zeros(12, device=DEVICE), experts.SMALL, padding)
    routed = route(logits, 1, experts.tickets())
    out = torch.full((1, weights.size), float("nan"), dtype=experts.OUT, device=DEVICE)
    assert not experts.few(tiles)(x, routed, weights, out).any()


@pytest.mark.parametrize("has_gate", [False, True])
def test_a_layer_norms_and_routes_in_one_launch(has_gate: bool) -> None:
    """As it does in three, with the residual stream in another tensor."""
    size, width = 256, 128
    routing = Routing(6, 2, normalise=True, shared_gate=has_gate)
    before = torch.get_default_dtype()
    torch.set_default_dtype(experts.HALF)
    try:
        with torch.device(DEVICE):
            layer, norm = MixtureOfExperts(size, width, routing, SOLO, shared_width=width), RMSNorm(size, 1e-5)
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(DEVICE).manual_seed(3)
    modules = [module for module in layer.modules() if isinstance(module, WeightedModule)]
    for module in modules:
        module.fill_dummy(generator)
    norm.weight.data.uniform_(0.5, 1.5, generator=generator)
    cells, tickets = (max(each) for each in zip(*(module.workspace_size() for module in modules), strict=True))
    options = GEMMOptions(Workspace.allocate(max(cells, 1 << 16), max(tickets, 64), torch.device(DEVICE)), fp8=True)
    for module in modules:
        module.finish(options)
    x, residual = (torch.randn(1, size, generator=generator, device=DEVICE).to(experts.HALF) for _ in range(2))
    live = experts.token_slots(torch.ones(1) > 0)
    both = Norm(norm.weight, norm.eps)
    with few_bits.kernels_of_operations():
        found = layer.partial_of_sum(x, residual, both, live, SOLO)
        assert layer.partial_of_sum(x.repeat(2, 1), residual.repeat(2, 1), both, live, SOLO) is None
        normed, stream = norm.add(x, residual.clone())
        expected = layer.partial(normed, live)
    assert found is not None and torch.equal(found[1], stream)
    torch.testing.assert_close(found[0].float(), expected.float(), rtol=2**-6, atol=2**-6 * float(expected.std()))
