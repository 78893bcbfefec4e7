"""`test_fixed_spans` with heads of 256 dimensions, six for each K/V head, as in Qwen3.5-27B. Items of such heads do not
add the results of their spans: `aerie.attention.backends.triton_backend.plan_fixed`."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.kernels.attend import references  # noqa: E402
from aerie.kernels.kv.batches import Mode  # noqa: E402
from tests.kernels.attend import test_fixed_spans as narrow  # noqa: E402
from tests.kernels.attend.test_fixed_spans import (  # noqa: E402, F401
    items_by,
    test_attention_is_right,
    test_rows_do_not_depend_on_the_other_requests,
)
from tests.support.kernels.triton_cases import assert_close, random_decode, random_pool, random_rows  # noqa: E402
from tests.support.kernels.triton_interpreter import DEVICE, INTERPRETED, MARKS  # noqa: E402

if not INTERPRETED:  # numpy's products of other numbers of rows have other bits on some CPUs
    from tests.kernels.attend.test_fixed_spans import (  # noqa: F401
        test_prompts_equal_decoding_however_they_are_cut,
        test_rows_of_a_chain_equal_rows_of_their_own,
        test_rows_of_a_tree_equal_those_of_their_path,
    )

pytestmark = MARKS


@pytest.fixture(autouse=True)
def wide_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("GROUP", 6), ("KV_HEADS", 1 if INTERPRETED else 4), ("HEAD_DIM", 256)):
        monkeypatch.setattr(narrow, name, size)


@pytest.mark.parametrize("mode,rows", [(Mode.DECODE, 1), (Mode.DRAFT_EXTEND, 3)])
def test_contexts_of_one_span_have_a_result(mode: Mode, rows: int) -> None:
    """Rounds over up to a span's tokens left their output as it was, and answers of Qwen3.5-27B ended early (H200)."""
    torch.manual_seed(12)
    prefixes, num_pages = [5, 0, 40], 12
    pool = random_pool(num_pages, narrow.PAGE, narrow.KV_HEADS, narrow.HEAD_DIM, narrow.DTYPE)
    batch = random_decode(mode, rows, rows, prefixes, narrow.PAGE, num_pages)
    q = random_rows(batch.num_rows, narrow.GROUP * narrow.KV_HEADS, narrow.HEAD_DIM, narrow.DTYPE)
    expected = references.decode(q, pool.layer(0), batch, narrow.PLAIN)
    found = []
    for left in (float("nan"), 7.0):
        torch.full_like(q, left, device=DEVICE)  # what the memory of the next output holds, on most runs
        found.append(narrow.attend(pool, batch, q))
        assert_close(found[-1], expected, narrow.DTYPE)
    assert torch.equal(*found)
