"""Routing and experts' products against torch's of what the weights mean. On a GPU, or interpreted."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed here")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from aerie.kernels.experts import many_rows_triton as many_row_module  # noqa: E402
from aerie.kernels.experts.few_rows_triton import few_row_experts  # noqa: E402
from aerie.kernels.experts.grouped import experts_one_by_one  # noqa: E402
from aerie.kernels.experts.many_rows_triton import many_row_experts, many_row_tiles  # noqa: E402
from aerie.kernels.experts.order_triton import block_of_program, max_blocks, order_by_expert  # noqa: E402
from aerie.kernels.experts.route import MAX_LISTED, NO_EXPERT, Routed, RouterLogits, Routing, TokenSlots  # noqa: E402  # noqa: E402
from aerie.kernels.experts.route import route as route_in_torch  # noqa: E402
from aerie.kernels.experts.route_triton import route  # noqa: E402
from aerie.kernels.experts.router_gemm_triton import ordered_router_tiles, router_gemm, router_tiles  # noqa: E402
from aerie.kernels.experts.weights import (  # noqa: E402
    ExpertTiles,
    ExpertWeights,
    ProductTiles,
    few_row_tiles,
    partial_sizes,
)
from aerie.kernels.fp8.rows import Fp8Rows, dequantized_rows  # noqa: E402
from aerie.kernels.fp8.rows_triton import quantize_rows  # noqa: E402
from aerie.kernels.gemm.workspace import Workspace  # noqa: E402
from aerie.kernels.kv.stored_values import FP8  # noqa: E402
from aerie.kernels.span import Span  # noqa: E402
from tests.support.kernels.triton_interpreter import DEVICE, INTERPRETED, MARKS  # noqa: E402

pytestmark = MARKS
HALF = torch.float16 if INTERPRETED else torch.bfloat16
OUT = torch.float32 if INTERPRETED else torch.bfloat16
SIZES = (256, 128) if INTERPRETED else (7168, 256)
ROUTINGS = {
    "V3": Routing(256, 8, "sigmoid", 8, 4, 2, has_bias=True, normalise=True, scale=2.5),
    "V2": Routing(12, 3, num_groups=4, groups_per_token=2, scale=16.0),
    "Kimi-K2": Routing(10, 4, "sigmoid", 1, 1, 2, has_bias=True, normalise=True, scale=2.827),
    "Qwen3": Routing(8, 2, normalise=True),
    "Qwen3.5": Routing(9, 3, normalise=True, shared_gate=True),
    "Gemma-4": Routing(8, 2, normalise=True, scales_experts=True),
}
SMALL = Routing(12, 3, "sigmoid", 4, 2, 2, has_bias=True, normalise=True, scale=2.5)
PAGE = 16


def tickets() -> Tensor:
    return torch.zeros(512, dtype=torch.int32, device=DEVICE)


def token_slots(is_live: Tensor) -> TokenSlots:
    return TokenSlots(torch.where(is_live, PAGE, PAGE - 1).to(DEVICE), PAGE)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("rows", [1, 5, MAX_LISTED, 70])
def test_routing_is_that_of_torch(name: str, rows: int) -> None:
    """With every third row padding, shared experts after the others, and a list of those that are used."""
    if INTERPRETED and rows > 5 and name != "Kimi-K2":
        pytest.skip("interpreting takes seconds")
    routing, generator = ROUTINGS[name], torch.Generator().manual_seed(rows)
    experts, k, shared, used_up = routing.num_experts, routing.experts_per_token, 2, tickets()
    logits = (torch.randn(rows, routing.num_logits, generator=generator) * 2).to(DEVICE)
    bias = (torch.randn(experts, generator=generator) - 2).to(DEVICE) if routing.has_bias else None
    is_live = torch.arange(rows) % 3 != 1
    scales = torch.linspace(0.5, 1.5, experts, device=DEVICE) if routing.scales_experts else None
    found = route(RouterLogits(logits, bias, routing, token_slots(is_live), scales), shared, used_up)
    given = RouterLogits(logits, bias, routing, expert_scales=scales)
    chosen, weight = given.choose()
    of_shared = given.shared_gate().sigmoid() if routing.shared_gate else torch.ones_like(logits[:, :1])
    order, expected = found.chosen[:, :k].sort(-1), chosen.sort(-1)
    for row in range(rows):
        if not is_live[row]:
            assert (found.chosen[row] == NO_EXPERT).all() and (found.weight[row] == 0).all()
            continue
        assert torch.equal(order.values[row].long(), expected.values[row])
        mine, theirs = found.weight[row, order.indices[row]], weight[row, expected.indices[row]]
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)  # float32, exp of another library
        assert found.chosen[row, k:].tolist() == [experts, experts + 1]
        torch.testing.assert_close(found.weight[row, k:], of_shared[row].expand(2), rtol=1e-6, atol=0)
    if rows > MAX_LISTED:
        assert found.used is None and found.num_used is None and found.rank is not None and found.count is not None
        for expert in range(experts + shared):
            ranks = found.rank[found.chosen == expert]
            assert sorted(ranks.tolist()) == list(range(int(found.count[expert])))
        return
    assert found.used is not None and found.num_used is not None and found.rank is None and not used_up.any()
    used = sorted({expert for row in found.chosen.tolist() for expert in row} - {NO_EXPERT})
    assert int(found.num_used) == len(used)
    assert found.used.tolist() == used + [NO_EXPERT] * (len(found.used) - len(used))


@pytest.mark.parametrize("size,biased", [(512, False), (256 + 64, True)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_routers_parts_are_added_up_in_their_order(deterministic: bool, size: int, biased: bool) -> None:
    """Its columns are shared by programs that do not wait for each other. One of them adds the bias."""
    rows, generator = 3 if INTERPRETED else 70, torch.Generator().manual_seed(3)
    x = torch.randn(rows, size, generator=generator).to(DEVICE, HALF)
    weight = (torch.randn(12, size, generator=generator) / size**0.5).to(DEVICE, HALF)
    added = torch.randn(12, generator=generator).to(DEVICE, HALF) if biased else None
    parts = router_gemm(x, weight, added, Workspace.allocate(1, 1, DEVICE), deterministic)
    assert parts.shape == (4 if size == 512 else 5, rows, 12)
    expected = F.linear(x.float(), weight.float(), None if added is None else added.float())
    torch.testing.assert_close(parts.sum(0), expected, rtol=1e-3, atol=1e-3)
    bias, total = torch.zeros(12, device=DEVICE), parts[0]
    for part in parts[1:]:
        total = total + part
    found, other = (route(RouterLogits(logits, bias, SMALL), 1, tickets()) for logits in (parts, total))
    assert torch.equal(found.chosen, other.chosen) and torch.equal(found.weight, other.weight)
    if deterministic:
        alone = router_gemm(x[1:2], weight, added, Workspace.allocate(1, 1, DEVICE), deterministic)
        assert torch.equal(alone[:, 0], parts[:, 1])


@pytest.mark.parametrize("size", [512, 2048])
def test_a_deterministic_router_reads_ahead_if_that_keeps_the_order(size: int) -> None:
    """2,048 columns are split into as many parts for 64 rows as for few."""
    count, generator = 20 if INTERPRETED else 600, torch.Generator().manual_seed(6)
    x = torch.randn(count, size, generator=generator).to(DEVICE, HALF)
    weight = (torch.randn(12, size, generator=generator) / size**0.5).to(DEVICE, HALF)
    if INTERPRETED:  # where numpy adds in an order of its own
        x, weight = x.round(), (weight * size**0.5).round()
    parts = router_gemm(x, weight, None, Workspace.allocate(1, 1, DEVICE), True)
    assert ordered_router_tiles(1, 12, size).ahead == (size == 2048) and not ordered_router_tiles(17, 12, size).ahead
    for rows in (1, 16, 17):
        assert torch.equal(router_gemm(x[:rows], weight, None, Workspace.allocate(1, 1, DEVICE), True), parts[:, :rows])


def test_a_router_of_few_rows_reads_all_of_its_weight_ahead() -> None:
    rows, size, generator = 5, 2048, torch.Generator().manual_seed(4)
    tiles = router_tiles(rows, 12, size)
    assert tiles.ahead and tiles.splits * tiles.block_k == size
    x = torch.randn(rows, size, generator=generator).to(DEVICE, HALF)
    weight = (torch.randn(12, size, generator=generator) / size**0.5).to(DEVICE, HALF)
    parts = router_gemm(x, weight, None, Workspace.allocate(1, 1, DEVICE), False)
    assert parts.shape == (16, rows, 12)
    torch.testing.assert_close(parts.sum(0), x.float() @ weight.float().T, rtol=1e-3, atol=1e-3)


def test_equal_preferences_choose_the_first_and_no_row_nobody() -> None:
    logits, routing = torch.zeros(2, 8, device=DEVICE), ROUTINGS["Qwen3"]
    found = route(RouterLogits(logits, None, routing), 0, tickets())
    assert found.chosen.tolist() == [[0, 1], [0, 1]] and found.weight.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert route(RouterLogits(logits[:0], None, routing), 0, tickets()).chosen.shape == (0, 2)
    none = route(RouterLogits(logits, None, routing, token_slots(torch.zeros(2) > 0)), 1, tickets())
    assert none.num_used is not None and int(none.num_used) == 0


@pytest.mark.parametrize("spoilt", [3, 12])
def test_a_row_of_nan_lists_experts_that_there_are(spoilt: int) -> None:
    """Kernels read the weights of whatever is listed."""
    logits = torch.linspace(-1, 1, 12, device=DEVICE).unsqueeze(0)
    logits[0, :spoilt] = float("nan")
    found = route(RouterLogits(logits, torch.zeros(12, device=DEVICE), SMALL), 1, tickets())
    assert found.used is not None and found.num_used is not None
    used, count = found.used.tolist(), int(found.num_used)
    assert used[:count] == sorted({*found.chosen[0].tolist()}) and used[count:] == [NO_EXPERT] * (len(used) - count)
    assert all(0 <= expert < 13 for expert in used[:count])


def check_order(chosen: Tensor, num_experts: int, block_m: int, num_shared: int = 0) -> None:
    """Check the order of pairs that are ranked as by routing, in any order."""
    live = (chosen.flatten() != NO_EXPERT).nonzero().flatten()
    ordered = live[torch.sort(chosen.flatten()[live], stable=True).indices]
    counts = torch.bincount(chosen.flatten()[live], minlength=num_experts)
    groups = [mine[torch.randperm(len(mine))] for mine in ordered.split(counts.tolist())]
    rank = torch.full_like(chosen, 1 << 20)
    for mine in groups:
        rank.view(-1)[mine] = torch.arange(len(mine), dtype=torch.int32)
    routed = Routed(chosen.to(DEVICE), torch.empty(0), rank=rank.to(DEVICE), count=counts.to(DEVICE, torch.int32))
    order = order_by_expert(routed, num_experts, block_m, num_shared)
    pairs, experts = order.pairs.cpu().view(-1, block_m), order.experts.cpu()
    assert len(experts) == max_blocks(chosen.numel(), num_experts, block_m)
    num_blocks = (counts + block_m - 1) // block_m
    numbers = torch.arange(num_experts).roll(num_shared)  # shared experts first
    used = numbers.repeat_interleave(num_blocks[numbers])
    assert experts.tolist() == used.tolist() + [NO_EXPERT] * (len(experts) - len(used))
    for expert, mine in enumerate(groups):
        expected = mine.tolist() + [NO_EXPERT] * (-len(mine) % block_m)
        assert pairs[experts == expert].flatten().tolist() == expected


@pytest.mark.parametrize("num_shared", [0, 2])
@pytest.mark.parametrize(("block_m", "rows"), [(16, 1), (16, 41), (64, 41), (64, 1500)])
def test_pairs_are_ordered_by_expert(block_m: int, rows: int, num_shared: int) -> None:
    chosen = torch.randint(-1, 6, (rows, 3), generator=torch.Generator().manual_seed(block_m), dtype=torch.int32)
    chosen[chosen == 4] = NO_EXPERT  # nobody's expert
    check_order(chosen, 7, block_m, num_shared)


@pytest.mark.parametrize("shape", [(1, 1), (1100, 1), (300, 9)])
@pytest.mark.parametrize("expert", [0, 256, NO_EXPERT])
def test_pairs_of_one_expert_and_of_none_are_ordered(shape: tuple[int, int], expert: int) -> None:
    check_order(torch.full(shape, expert, dtype=torch.int32), 257, 64, 1)


def test_pairs_are_ordered_as_deepseek_chooses() -> None:
    """The last expert is everybody's; with padding rows at the end."""
    chosen = torch.randint(0, 256, (613, 9), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    chosen[:, 8], chosen[500:] = 256, NO_EXPERT
    check_order(chosen, 257, 128, num_shared=1)


@triton.jit  # type: ignore[untyped-decorator]
def _blocks_of_programs(out_ptr, shared, stride):  # type: ignore[no-untyped-def]
    tl.store(out_ptr + tl.program_id(0), block_of_program(tl.program_id(0), shared, stride))


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize(("rows", "slots", "num_shared"), [(1, 4, 3), (5, 3, 0), (256, 9, 1), (130, 6, 2)])
def test_every_block_has_a_program_and_shared_experts_are_spread(
    rows: int, slots: int, num_shared: int, block_m: int
) -> None:
    chosen = torch.full((rows, slots), NO_EXPERT, dtype=torch.int32, device=DEVICE)
    count = torch.zeros(256 + num_shared, dtype=torch.int32, device=DEVICE)
    routed = Routed(chosen, torch.empty(0), rank=torch.empty_like(chosen), count=count)
    order = order_by_expert(routed, 256 + num_shared, block_m, num_shared)
    assert order.shared == num_shared * -(-rows // block_m)
    out = torch.empty_like(order.experts)
    _blocks_of_programs[(len(out),)](out, order.shared, order.stride)
    assert sorted(out.tolist()) == list(range(len(out)))
    programs = [program for program, block in enumerate(out.tolist()) if block < order.shared]
    assert programs == [order.stride * i for i in range(order.shared)]
    if rows == 256 and block_m == 16:  # over the 272 blocks of rows that choose evenly, the last of them excepted
        assert 230 <= programs[-1] <= 262


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 114, 256, 2048, 4096, 8192])
def test_pairs_of_prompts_are_ordered_by_expert(rows: int) -> None:
    """As many as a step may have, counted and ranked by the routing."""
    routing, generator = ROUTINGS["V3"], torch.Generator(DEVICE).manual_seed(rows)
    logits, bias = torch.randn(rows, 256, device=DEVICE, generator=generator), torch.zeros(256, device=DEVICE)
    live = token_slots(torch.arange(rows) < rows - 5)
    routed = route(RouterLogits(logits, bias, routing, live), 1, tickets())
    order = order_by_expert(routed, 257, 64, 1)
    pairs, chosen = order.pairs.view(-1, 64)[order.experts >= 0], routed.chosen.flatten()
    owners = order.experts[order.experts >= 0, None].expand_as(pairs)[pairs >= 0]
    found = pairs[pairs >= 0].long()
    assert torch.equal(found.sort().values, (chosen != NO_EXPERT).nonzero().flatten())
    assert torch.equal(chosen[found], owners)


def weights_of(kind: str, num_experts: int, num_shared: int, seed: int) -> tuple[ExpertWeights, Tensor, Tensor]:
    """And what they mean, float32."""
    (size, width), generator = SIZES, torch.Generator(DEVICE).manual_seed(seed)
    made, meant = [], []
    for rows, columns in ((2 * width, size), (size, width)):
        values = torch.randn(num_experts, rows, columns, generator=generator, device=DEVICE)
        if kind == "half":
            values = (values / columns**0.5).to(HALF)
            made.append((values, None))
            meant.append(values.float())
            continue
        shape = (num_experts, rows // 64, columns // 128) if kind == "group" else (num_experts, rows, 1)
        scales = (torch.rand(shape, generator=generator, device=DEVICE) + 0.5) / 30 / columns**0.5
        values = (values * 30).to(FP8)
        full = scales.repeat_interleave(64, 1).repeat_interleave(128, 2) if kind == "group" else scales
        made.append((values, scales))
        meant.append(values.float() * full)
    (gate_up, gate_up_scales), (down, down_scales) = made
    weights = ExpertWeights(gate_up, down, gate_up_scales, down_scales, num_shared)
    return weights, meant[0], meant[1]


def rows_for(weights: ExpertWeights, rows: int, generator: torch.Generator) -> tuple[Tensor | Fp8Rows, Tensor]:
    """And what they mean, float32."""
    x = torch.randn(rows, weights.size, generator=generator).to(DEVICE, HALF)
    if not weights.in_fp8:
        return x, x.float()
    quantized = quantize_rows(x, weights.by_group)
    return quantized, dequantized_rows(quantized)


Multiply = Callable[[Tensor | Fp8Rows, Routed, ExpertWeights, Tensor], Tensor]


def few(tiles: ExpertTiles | None = None) -> Multiply:
    def multiply(x: Tensor | Fp8Rows, routed: Routed, weights: ExpertWeights, out: Tensor) -> Tensor:
        rows, slots = routed.chosen.shape
        sizes = weights.sizes(slots)
        chosen = tiles or few_row_tiles(rows, sizes)
        workspace = Workspace.allocate(*partial_sizes(rows, sizes, chosen), DEVICE)
        few_row_experts(x, routed, weights, workspace, chosen, out)
        assert int(workspace.tickets.abs().sum()) == 0
        return out

    return multiply


def many(tiles: ExpertTiles | None = None) -> Multiply:
    def multiply(x: Tensor | Fp8Rows, routed: Routed, weights: ExpertWeights, out: Tensor) -> Tensor:
        rows, slots = routed.chosen.shape
        chosen = tiles or many_row_tiles(rows, weights.sizes(slots))
        many_row_experts(x, routed, weights, chosen, out)
        assert routed.count is not None and not routed.count.any()
        return out

    return multiply


def check(
    kind: str,
    multiply: Multiply,
    rows: int,
    seed: int,
    routing: Routing = SMALL,
    shared: int = 1,
    list_used: bool = False,
) -> None:
    """Padding rows, which have NaN in them, get zeros and touch nobody. list_used: for products of few rows."""
    generator = torch.Generator().manual_seed(seed)
    weights, gate_up, down = weights_of(kind, routing.num_experts + shared, shared, seed)
    x, meant = rows_for(weights, rows, generator)
    is_live = torch.arange(rows) % 4 != 2
    for values in (x.scales, meant) if isinstance(x, Fp8Rows) else (x, meant):
        values[~is_live.to(DEVICE)] = float("nan")
    logits = (torch.randn(rows, routing.num_experts, generator=generator) * 2).to(DEVICE)
    bias = torch.randn(routing.num_experts, generator=generator).to(DEVICE)
    routed = route(RouterLogits(logits, bias, routing, token_slots(is_live)), shared, tickets(), list_used)
    out = torch.full((rows, weights.size), float("nan"), dtype=OUT, device=DEVICE)
    multiply(x, routed, weights, out)
    expected = experts_one_by_one(meant, routed.chosen.long(), routed.weight, gate_up, down)
    assert (out[~is_live.to(DEVICE)] == 0).all()
    mine, theirs = (values[is_live.to(DEVICE)].double() for values in (out, expected))
    error = float((mine - theirs).norm() / theirs.norm())
    # Inner activations have 4 bits of mantissa in FP8 (2^-5 of a value at most, about 2.6 % of them in the mean of
    # squares), 8 in bfloat16 and 11 in float16; results are rounded to 8 on a GPU.
    assert error < (0.035 if weights.in_fp8 else 6e-3), error


@pytest.mark.parametrize("kind", ["group", "channel", "half"])
@pytest.mark.parametrize("rows", [1, 3, MAX_LISTED] if INTERPRETED else [1, 3, 8, 13, MAX_LISTED])
def test_experts_of_few_rows(kind: str, rows: int) -> None:
    check(kind, few(), rows, rows, list_used=True)


@pytest.mark.parametrize("kind", ["group", "channel"])
def test_experts_of_one_row_that_are_read_ahead(kind: str) -> None:
    """Those of a row, and of a padding row, which has none."""
    weights, _, _ = weights_of(kind, 13, 1, 0)
    tiles = few_row_tiles(1, weights.sizes(4))
    assert tiles.down.ahead and tiles.down.splits == 4
    for seed in range(3):
        check(kind, few(tiles), 1, seed, list_used=True)
    x, _ = rows_for(weights, 1, torch.Generator().manual_seed(1))
    nobody = token_slots(torch.zeros(1) > 0)
    routed = route(
        RouterLogits(torch.zeros(1, 12, device=DEVICE), torch.zeros(12, device=DEVICE), SMALL, nobody), 1, tickets()
    )
    out = torch.full((1, weights.size), float("nan"), dtype=OUT, device=DEVICE)
    assert not few(tiles)(x, routed, weights, out).any()


@pytest.mark.parametrize("kind", ["group", "channel", "half"])
@pytest.mark.parametrize("rows", [1, 40] if INTERPRETED else [1, 17, 33, 65, 256, 600, 2048])
def test_experts_of_many_rows(kind: str, rows: int) -> None:
    check(kind, many(), rows, rows)


@pytest.mark.parametrize("block_n,splits", [(64, 1), (128, 1), (128, 2)])
def test_any_tiles_are_right(block_n: int, splits: int) -> None:
    weights, _, _ = weights_of("group", 13, 1, 0)
    tiles = few_row_tiles(3, weights.sizes(4))
    tiles = ExpertTiles(
        tiles.block_m,
        replace(tiles.gate_up, block_n=block_n, splits=splits),
        replace(tiles.down, block_n=block_n, splits=splits),
    )
    check("group", few(tiles), 3, 3, list_used=True)
    if splits == 1:
        check("group", many(tiles), 7, 7)
        check("half", many(replace(tiles, block_m=32)), 7, 7)


@pytest.mark.parametrize("kind", ["group", "channel", "half"])
@pytest.mark.parametrize("block_n,held", [(64, True)] if INTERPRETED else [(64, True), (128, False)])
def test_tall_blocks_in_spans_of_columns(kind: str, block_n: int, held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of prompts; with and without the rows' inner activations kept from one block of columns to the next."""
    monkeypatch.setattr(many_row_module, "_MAX_HELD", 4 if held else 0)
    monkeypatch.setattr(many_row_module, "MAX_PARTIAL_BYTES", 0)  # as many spans as there can be
    products = ProductTiles(block_n, 1, 2, 8), ProductTiles(64, 1, 2, 4, blocks=2 if held else 1)
    check(kind, many(ExpertTiles(64, *products)), 5 if INTERPRETED else 700, 7)


@pytest.mark.parametrize("kind", ["group", "channel", "half"])
@pytest.mark.parametrize("block_n,blocks,held", [(64, 2, True)] if INTERPRETED else [(64, 2, True), (128, 1, False)])
def test_short_blocks_of_several_columns(
    kind: str, block_n: int, blocks: int, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of rounds; with and without the rows' inner activations kept from one block of columns to the next."""
    monkeypatch.setattr(many_row_module, "_MAX_HELD", 4 if held else 0)
    products = ProductTiles(64, 1, 3, 4), ProductTiles(block_n, 1, 3, 4, blocks)
    check(kind, many(ExpertTiles(16, *products)), 5 if INTERPRETED else 100, 7)


def test_rows_that_were_counted_for_nobody_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next routing begins at zero where there was no memory to multiply."""

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("none left")

    rows, counts = MAX_LISTED + 4, tickets()
    weights, _, _ = weights_of("half", 13, 1, 1)
    x, _ = rows_for(weights, rows, torch.Generator().manual_seed(1))
    routed = route(RouterLogits(torch.zeros(rows, 12, device=DEVICE), torch.zeros(12, device=DEVICE), SMALL), 1, counts)
    assert int(counts.sum()) == rows * 4
    monkeypatch.setattr(many_row_module, "inner_rows", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        many()(x, routed, weights, torch.empty(rows, weights.size, dtype=OUT, device=DEVICE))
    assert not counts.any()


@pytest.mark.parametrize("partly", [False, True])
def test_sums_leave_out_what_nobody_wrote(partly: bool) -> None:
    """All parts of a padding row, some of a row whose experts other ranks have; of the second span of columns."""
    rows, slots, span, size = 5, 3, 48, 144
    chosen = torch.randint(0, 6, (rows, slots), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    chosen[1] = NO_EXPERT
    if partly:
        chosen[3, 1] = NO_EXPERT
    parts = torch.randn(rows, slots, span, generator=torch.Generator().manual_seed(2)).to(DEVICE, HALF)
    parts[(chosen == NO_EXPERT).to(DEVICE)] = float("nan")
    out = torch.full((rows, size), 7.0, dtype=OUT, device=DEVICE)
    constants = {"SIZE": size, "STEP": span, "SPAN": span, "CHOICES": slots, "SOME_ABSENT": partly}
    many_row_module._sum_choices[(rows, 2)](parts, chosen.to(DEVICE), out, 1, BLOCK=32, PDL=False, **constants)
    expected = torch.full_like(out, 7.0)
    first, *others = parts.nan_to_num(0.0).float().unbind(1)
    expected[:, span : 2 * span] = sum(others, first)
    assert torch.equal(out, expected)


def test_routed_experts_alone() -> None:
    check("group", few(), 5, 1, shared=0, list_used=True)
    check("half", many(), 9, 1, shared=0)


@pytest.mark.parametrize("kind", ["group", "channel", "half"])
def test_a_row_of_many_depends_on_nothing_else(kind: str) -> None:
    """Whoever is beside it, in whatever tiles."""
    rows, generator = 7 if INTERPRETED else 300, torch.Generator().manual_seed(5)
    weights, _, _ = weights_of(kind, 13, 1, 2)
    x, _ = rows_for(weights, rows, generator)
    logits = torch.randn(rows, 12, generator=generator).to(DEVICE)

    def part(first: int, count: int, multiply: Multiply) -> Tensor:
        span = slice(first, first + count)
        mine = Fp8Rows(x.values[span], x.scales[span]) if isinstance(x, Fp8Rows) else x[span]
        routed = route(RouterLogits(logits[span], None, replace(SMALL, has_bias=False)), 1, tickets(), list_used=False)
        return multiply(mine, routed, weights, torch.empty(count, weights.size, dtype=OUT, device=DEVICE))

    def tiles(count: int) -> ExpertTiles:
        return many_row_tiles(count, weights.sizes(4), deterministic=True)

    whole = part(0, rows, many(tiles(rows)))
    for first, count in ((3, 4),) if INTERPRETED else ((rows - 1, 1), (3, 4), (1, 22)):
        assert torch.equal(part(first, count, many(tiles(count))), whole[first : first + count])
    if not INTERPRETED:  # takes seconds
        assert torch.equal(part(0, rows, many(replace(tiles(rows), block_m=128))), whole)


@pytest.mark.parametrize("name", ["Qwen3", "V3"])
def test_a_rows_routing_depends_on_nothing_else(name: str) -> None:
    """To the bit, where no experts are listed; a GPU's sums of softmax have one order for each number of warps."""
    routing, rows = ROUTINGS[name], 5 if INTERPRETED else 600
    logits = (torch.randn(rows, routing.num_experts, generator=torch.Generator().manual_seed(1)) * 2).to(DEVICE)
    bias = torch.zeros(routing.num_experts, device=DEVICE) if routing.has_bias else None
    whole = route(RouterLogits(logits, bias, routing), 1, tickets(), list_used=False)
    for first, count in ((1, 1), (2, 3)) if INTERPRETED else ((1, 1), (3, 17), (99, 64), (5, 300)):
        part = route(RouterLogits(logits[first : first + count], bias, routing), 1, tickets(), list_used=False)
        assert part.used is None and part.num_used is None
        assert torch.equal(part.chosen, whole.chosen[first : first + count])
        assert torch.equal(part.weight, whole.weight[first : first + count])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["group", "half"])
@pytest.mark.parametrize("rows", [1, 8, MAX_LISTED, 64, 256, 512])
def test_a_replayed_graph_goes_to_the_experts_that_are_chosen_then(kind: str, rows: int) -> None:
    routing, shared = ROUTINGS["V3"], 1
    weights, gate_up, down = weights_of(kind, routing.num_experts + shared, shared, 0)
    x = torch.zeros(rows, weights.size, dtype=HALF, device=DEVICE)
    logits, bias = (
        torch.zeros(rows, routing.num_experts, device=DEVICE),
        torch.randn(routing.num_experts, device=DEVICE),
    )
    slots = torch.full((rows,), PAGE, device=DEVICE)
    out = torch.empty(rows, weights.size, dtype=OUT, device=DEVICE)
    num_slots = routing.experts_per_token + shared
    sizes = weights.sizes(num_slots)
    few_tiles = few_row_tiles(rows, sizes) if rows <= MAX_LISTED else None
    cells, num_tickets = (1, 1) if few_tiles is None else partial_sizes(rows, sizes, few_tiles)
    workspace = Workspace.allocate(cells, max(num_tickets, routing.num_experts + shared), DEVICE)

    def step() -> None:
        rows_in = quantize_rows(x, weights.by_group) if weights.in_fp8 else x
        routed = route(RouterLogits(logits, bias, routing, TokenSlots(slots, PAGE)), shared, workspace.tickets)
        if few_tiles is None:
            many_row_experts(rows_in, routed, weights, many_row_tiles(rows, sizes), out)
        else:
            few_row_experts(rows_in, routed, weights, workspace, few_tiles, out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn in range(3):
        x.normal_()
        logits.normal_()
        slots.fill_(PAGE)
        slots[rows - turn :] = 0  # the last rows are padding
        live = rows - turn
        graph.replay()
        first = out.clone()
        graph.replay()
        assert torch.equal(first, out)
        if live < 1:
            assert (out == 0).all()
            continue
        meant = dequantized_rows(quantize_rows(x, weights.by_group)) if weights.in_fp8 else x.float()
        chosen, weight = route_in_torch(logits, bias, routing)
        every = torch.full((rows, 1), routing.num_experts, device=DEVICE)
        chosen, weight = (
            torch.cat((chosen, every), 1),
            torch.cat((weight, torch.ones_like(every, dtype=torch.float32)), 1),
        )
        expected = experts_one_by_one(meant, chosen, weight, gate_up, down)[:live]
        assert (out[live:] == 0).all()
        error = float((out[:live].double() - expected.double()).norm() / expected.double().norm())
        assert error < (0.035 if weights.in_fp8 else 6e-3), error


def test_routing_to_experts_of_other_ranks_is_to_nobody() -> None:
    """Three of eight experts are on this rank, from number 3 on; a shared one is numbered after them."""
    routing, rows = ROUTINGS["Qwen3"], 5
    logits = (torch.randn(rows, 8, generator=torch.Generator().manual_seed(2)) * 2).to(DEVICE)
    router = RouterLogits(logits, None, routing, token_slots(torch.arange(rows) != 1))
    everywhere, here = route(router, 1, tickets()), route(router, 1, tickets(), held=Span(3, 6, 8))
    chosen, is_here = everywhere.chosen.cpu(), (everywhere.chosen.cpu() >= 3) & (everywhere.chosen.cpu() < 6)
    assert is_here[:, :2].any() and not is_here[:, :2].all()
    expected = torch.where(is_here, chosen - 3, NO_EXPERT)
    expected[:, 2] = torch.where(torch.arange(rows) == 1, NO_EXPERT, 3)
    assert torch.equal(here.chosen.cpu(), expected.int())
    assert torch.equal(here.weight.cpu(), everywhere.weight.cpu() * (expected != NO_EXPERT))
    assert here.used is not None and here.num_used is not None
    used = sorted(set(expected.flatten().tolist()) - {NO_EXPERT})
    assert here.used.tolist() == used + [NO_EXPERT] * (4 - len(used)) and int(here.num_used) == len(used)
