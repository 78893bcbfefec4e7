"""The adapters' part of a linear layer and of an embedding, on a CPU."""

import pytest
import torch

from aerie.kernels.lora import embedding_host, product_host
from aerie.kernels.lora.embedding import add_lora_embedding
from aerie.kernels.lora.product import add_lora
from tests.kernels.ops.case import TOLERANCE, Case
from tests.kernels.ops.lora_cases import EMBEDDING_CASES, LORA_CASES, lora_tables

CPU = torch.device("cpu")


def test_each_row_gets_its_adapters_matrices() -> None:
    tables = lora_tables(3, 32, 40, (0, 24, 33), 35, torch.float64, CPU)
    x, y = torch.randn(4, 40, dtype=torch.float64), torch.randn(4, 35, dtype=torch.float64)
    chosen, expected = [2, -1, 0, 1], y.clone()
    for row, place in enumerate(chosen):
        for part, (first, end) in enumerate(((0, 24), (24, 33))):
            if place >= 0:
                inner = tables.down[place, 32 * part : 32 * part + 32] @ x[row]
                expected[row, first:end] += tables.up[place, first:end] @ inner
    assert add_lora.reference(y, x, tables, torch.tensor(chosen, dtype=torch.int32)) is y
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", LORA_CASES, ids=lambda case: case.name)
def test_a_cpus_products_are_the_references(case: Case) -> None:
    ours, expected = case.arguments(CPU), case.arguments(CPU)
    product_host.add_lora(*ours)
    add_lora.reference(*expected)
    scale = expected[0].float().abs().max()
    tolerance = TOLERANCE[expected[0].dtype]
    torch.testing.assert_close(ours[0].float() / scale, expected[0].float() / scale, rtol=0, atol=tolerance)


def test_a_row_without_an_adapter_keeps_its_bits_beside_a_broken_one() -> None:
    tables = lora_tables(1, 16, 8, (0, 16), 16, torch.float32, CPU)
    x, y = torch.full((2, 8), torch.nan), torch.randn(2, 16)
    for function in (add_lora.reference, product_host.add_lora):
        result = function(y.clone(), x, tables, torch.tensor([-1, 0], dtype=torch.int32))
        assert result[0].equal(y[0]) and result[1].isnan().all()


@pytest.mark.parametrize("case", EMBEDDING_CASES, ids=lambda case: case.name)
def test_a_cpus_rows_of_an_embedding_are_the_references(case: Case) -> None:
    ours, expected = case.arguments(CPU), case.arguments(CPU)
    embedding_host.add_lora_embedding(*ours)
    add_lora_embedding.reference(*expected)
    tolerance = TOLERANCE[expected[0].dtype] * expected[0].float().abs().max()
    torch.testing.assert_close(ours[0], expected[0], rtol=0, atol=float(tolerance))


def test_an_embeddings_row_gets_the_column_of_its_id() -> None:
    """An id of another shard, a row without an adapter, and one whose adapter is broken keep to themselves."""
    tables = lora_tables(3, 16, 5, (0, 8), 8, torch.float32, CPU)
    tables.down[1] = torch.nan
    y, ids = torch.randn(6, 8), torch.tensor([4, -1, 2, 3, 0, 5])
    chosen = torch.tensor([2, 0, -1, 1, 0, 0], dtype=torch.int32)
    for function in (add_lora_embedding.reference, embedding_host.add_lora_embedding):
        found = function(y.clone(), ids, tables, chosen)
        assert found[[1, 2, 5]].equal(y[[1, 2, 5]]) and found[3].isnan().all()
        for row, place in ((0, 2), (4, 0)):
            torch.testing.assert_close(found[row], y[row] + tables.up[place] @ tables.down[place][:, ids[row]])
