"""Speculation changes no token of a trained Qwen3.5 with its own module: the state of recurrent layers after chains and
trees, on text that was learnt.

`tests/models/hybrid_tiny` was made by `tests.support.targets` (its README says how), with the tokenizer of
`deepseek_tiny`, so that both have the same prompts.
"""

import pytest

from speculative.config import Method
from tests.speculative.drafts.test_trained_mtp import CHAIN, TREE, accepted_tokens, answers
from tests.support import ROOT

MODEL = ROOT / "tests" / "models" / "hybrid_tiny"


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [request.output for request in answers(None, model=MODEL)]


@pytest.mark.parametrize(
    "shape,ranks,page_size,rows,least",
    [
        pytest.param(CHAIN, 1, 16, 0, 2.4, id="chain", marks=pytest.mark.slow),
        pytest.param(TREE, 1, 1, 128, 2.6, id="tree, pages of 1, a quarter of the vocabulary", marks=pytest.mark.slow),
        pytest.param(CHAIN, 2, 1, 0, 2.4, id="chain, 2 ranks, pages of 1", marks=pytest.mark.slow),
        pytest.param(TREE, 2, 16, 0, 2.7, id="tree, 2 ranks", marks=pytest.mark.slow),
    ],
)
def test_its_module_changes_no_token(
    plain: list[list[int]], shape: tuple[int, int, int], ranks: int, page_size: int, rows: int, least: float
) -> None:
    """Greedy and drawn. In float32 on one machine, see `test_trained_mtp`."""
    requests = answers(shape, ranks, page_size, MODEL, draft_vocab_size=rows)
    assert [request.output for request in requests] == plain
    assert accepted_tokens(requests) > least


@pytest.mark.parametrize(
    "method,shape,ranks,least",
    [
        pytest.param("dspark", (8, 4, 16), 1, 3.0, id="DSpark, tree", marks=pytest.mark.slow),
        pytest.param("dflash2", (7, 1, 8), 1, 3.0, id="DFlash2, chain", marks=pytest.mark.slow),
        pytest.param("dflash2", (7, 4, 16), 2, 3.0, id="DFlash2, tree, 2 ranks", marks=pytest.mark.slow),
    ],
)
def test_its_block_heads_change_no_token(
    plain: list[list[int]], method: Method, shape: tuple[int, int, int], ranks: int, least: float
) -> None:
    requests = answers(shape, ranks, model=MODEL, draft=str(MODEL / method), method=method)
    assert [request.output for request in requests] == plain
    assert accepted_tokens(requests) > least
