"""The fused steps of a round against their torch references: on a GPU, or under Triton's interpreter
(TRITON_INTERPRET=1), which `tests/kernels/test_triton_interpreter.py` starts in a process of its own."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.kernels.vocabulary.topk_log_softmax import NOT_FINITE  # noqa: E402
from aerie.kernels.vocabulary.topk_log_softmax_triton import largest, topk_log_softmax  # noqa: E402
from tests.support.kernels.triton_interpreter import DEVICE, INTERPRETED, MARKS  # noqa: E402

pytestmark = MARKS


@pytest.mark.parametrize("rows,size", [(1, 128256), (7, 5000), (64, 32000), (3, 17)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_is_the_first_of_the_largest(rows: int, size: int, dtype: torch.dtype) -> None:
    if INTERPRETED and (size > 5000 or dtype == torch.bfloat16):
        pytest.skip("too large, or computed on raw bits, under the interpreter")
    torch.manual_seed(size)
    x = torch.randn((rows, size), device=DEVICE).to(dtype)
    x[0, size // 2] = x[0].max()  # equals: the smaller column wins
    expected = torch.stack([(row == row.max()).nonzero()[0, 0] for row in x])
    assert torch.equal(largest(x, True)[1], expected)
    x[:, : size // 3] = float("-inf")
    expected = torch.stack([(row == row.max()).nonzero()[0, 0] for row in x])
    assert torch.equal(largest(x, True)[1], expected)
    broken = x.clone()
    broken[-1, size // 2] = float("nan")
    broken[rows // 2, -1] = float("inf")
    value, column = largest(broken, True)
    hurt = sorted({rows // 2, rows - 1})
    assert (column[hurt] == NOT_FINITE).all() and value[hurt].isinf().all()
    expected[hurt] = NOT_FINITE
    assert torch.equal(column, expected)
    broken[-1] = float("nan")
    assert int(largest(broken)[1].min()) >= 0 and int(largest(broken)[1].max()) < size


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
@pytest.mark.parametrize("k", [1, 4])
def test_of_nan_come_ids_that_there_are(k: int) -> None:
    """A draft whose numbers are NaN proposes anything, but no row outside of its tables."""
    x = torch.randn((4, 5000), generator=torch.Generator().manual_seed(k)).to(DEVICE)
    x[1], x[2, 17], x[3] = float("nan"), float("nan"), float("inf")
    ids = topk_log_softmax(x, k)[1]
    for found in (ids, largest(x)[1]):
        assert int(found.min()) >= 0 and int(found.max()) < 5000
    assert torch.equal(ids[0], x[0].topk(k).indices)
