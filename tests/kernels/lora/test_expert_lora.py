"""The adapters' part of routed experts' products, on a CPU; and how pairs are sorted by expert."""

import pytest
import torch

from aerie.kernels.experts.adapted import product_host as experts_host
from aerie.kernels.experts.adapted.product import ExpertBlocks, add_expert_lora, blocks_by_expert
from tests.kernels.ops.case import TOLERANCE, Case
from tests.kernels.ops.lora_cases import EXPERT_CASES as CASES
from tests.kernels.ops.lora_cases import chosen_experts, expert_tables

CPU = torch.device("cpu")


@pytest.mark.parametrize("block_m", [1, 4, 16])
@pytest.mark.parametrize("count", [1, 7, 40])
def test_every_pair_has_one_cell_in_a_block_of_its_expert(count: int, block_m: int) -> None:
    chosen = chosen_experts(count, 3, 5)
    blocks = blocks_by_expert(chosen, 6, block_m)
    cells = blocks.pairs.view(-1, block_m)
    assert (
        cells.shape[0]
        == blocks.experts.shape[0]
        == (chosen.numel() + min(6, chosen.numel()) * (block_m - 1)) // block_m
    )
    found = {}
    for expert, pairs in zip(blocks.experts.tolist(), cells.tolist(), strict=True):
        used = [pair for pair in pairs if pair >= 0]
        assert pairs[: len(used)] == used == sorted(used) and bool(used) == (expert >= 0)
        found |= dict.fromkeys(used, expert)
    assert blocks.experts[blocks.experts >= 0].tolist() == sorted(blocks.experts[blocks.experts >= 0].tolist())
    assert found == {pair: expert for pair, expert in enumerate(chosen.flatten().tolist()) if expert >= 0}
    assert sum(pair >= 0 for pair in blocks.pairs.tolist()) == len(found)
    of_cell = blocks.expert_of_cell()
    assert all(of_cell[i] == (-1 if pair < 0 else found[pair]) for i, pair in enumerate(blocks.pairs.tolist()))


def test_each_pair_gets_the_matrices_of_its_adapter_and_expert() -> None:
    tables = expert_tables(2, 5, 16, 24, (0, 20, 40), torch.float32, CPU)
    chosen, index = torch.tensor([[4, 1], [1, 0], [2, 3]]), torch.tensor([1, -1, 0], dtype=torch.int32)
    blocks = blocks_by_expert(chosen, 5, 2)
    x, y = torch.randn(3, 24), torch.randn(blocks.pairs.shape[0], 40)
    expected = y.clone()
    for cell, pair in enumerate(blocks.pairs.tolist()):
        row, slot = divmod(pair, 2)
        if pair >= 0 and index[row] >= 0:
            down, up = tables.down[index[row], chosen[row, slot]], tables.up[index[row], chosen[row, slot]]
            for part in range(2):
                expected[cell, 20 * part : 20 * part + 20] += (
                    up[20 * part : 20 * part + 20] @ down[16 * part : 16 * part + 16] @ x[row]
                )
    assert add_expert_lora.reference(y, x, tables, blocks, index) is y
    used = blocks.pairs >= 0
    torch.testing.assert_close(y[used], expected[used], rtol=1e-5, atol=1e-5)


def test_the_second_product_is_weighted_and_stored_by_pair() -> None:
    tables = expert_tables(2, 5, 16, 24, (0, 40), torch.float32, CPU)
    chosen, index = torch.tensor([[4, 1], [1, 0], [2, -1]]), torch.tensor([1, -1, 0], dtype=torch.int32)
    blocks, weight = blocks_by_expert(chosen, 5, 2), torch.rand(3, 2)
    x, y = torch.randn(blocks.pairs.shape[0], 24), torch.randn(6, 40)
    expected = y.clone()
    for cell, pair in enumerate(blocks.pairs.tolist()):
        row, slot = divmod(pair, 2)
        if pair >= 0 and index[row] >= 0:
            down, up = tables.down[index[row], chosen[row, slot]], tables.up[index[row], chosen[row, slot]]
            expected[pair] += weight[row, slot] * (up @ down @ x[cell])
    add_expert_lora.reference(y, x, tables, blocks, index, weight)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_cpus_products_are_the_references(case: Case) -> None:
    ours, expected = case.arguments(CPU), case.arguments(CPU)
    experts_host.add_expert_lora(*ours)
    add_expert_lora.reference(*expected)
    scale = expected[0].float().abs().max()
    tolerance = TOLERANCE[expected[0].dtype]
    torch.testing.assert_close(ours[0].float() / scale, expected[0].float() / scale, rtol=0, atol=tolerance)


def test_rows_without_an_adapter_and_unused_cells_do_not_read_broken_ones() -> None:
    tables = expert_tables(1, 2, 16, 8, (0, 16), torch.float32, CPU)
    blocks = ExpertBlocks(
        torch.tensor([0, 3, -1, -1, 7, 9], dtype=torch.int32), torch.tensor([0, 1, -1], dtype=torch.int32), 2, 2
    )
    index, x = torch.tensor([0, -1], dtype=torch.int32), torch.full((6, 8), torch.nan)
    y, weight = torch.randn(4, 16), torch.ones(2, 2)
    for function in (add_expert_lora.reference, experts_host.add_expert_lora):
        result = function(y.clone(), x, tables, blocks, index, weight)
        assert result[1:].equal(y[1:]) and result[0].isnan().all()
