"""The best of a draft's logits, by a kernel, against torch: on a GPU, or under Triton's interpreter
(TRITON_INTERPRET=1), which `tests/attention/test_triton_interpreter.py` starts in a process of its own."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from tests.support.triton_interpreter import DEVICE, INTERPRETED, MARKS  # noqa: E402
from workers.layers.kernels import topk  # noqa: E402

pytestmark = MARKS


@pytest.mark.parametrize("rows,size,k", [(1, 128256, 4), (40, 32000, 10), (3, 17, 4), (2, 4097, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_topk_of_log_softmax_is_torch_s(rows: int, size: int, k: int, dtype: torch.dtype) -> None:
    if INTERPRETED and (size > 40000 or dtype == torch.bfloat16):
        pytest.skip("too large, or computed on raw bits, under the interpreter")
    torch.manual_seed(size)
    logits = (torch.randn((rows, size), device=DEVICE) * 3).to(dtype)
    logits[0, size // 2] = logits[0].max()  # equals: the smaller column comes first
    best, ids, norms = topk.topk_log_softmax(logits, k)
    expected = topk.reference(logits, k)
    assert torch.equal(ids, expected[1])
    # sums of up to 128,256 float32 terms in another order
    torch.testing.assert_close(best, expected[0], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(norms, expected[2], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("size,k", [(17, 4), (5000, 8), (4097, 16), (8, 8)])
def test_no_column_is_found_twice_where_fewer_are_finite(size: int, k: int) -> None:
    """As a grammar's mask leaves rows: none finite, one at the end, and one less than is asked for."""
    logits = torch.full((3, size), float("-inf"), device=DEVICE)
    logits[1, size - 1] = 2.0
    logits[2, :: max(1, size // (k - 1))][: k - 1] = torch.arange(k - 1, device=DEVICE).float()
    logits[2, 0] = float("-inf")
    best, ids, norms = topk.topk_log_softmax(logits, k)
    expected = topk.reference(logits, k)
    assert all(len(set(row)) == k for row in ids.tolist()), ids
    assert torch.equal(ids, expected[1])
    torch.testing.assert_close(best, expected[0])
    torch.testing.assert_close(norms, expected[2])
