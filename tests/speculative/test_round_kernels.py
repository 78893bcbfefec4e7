"""The fused steps of a round against their torch references: on a GPU, or under Triton's interpreter
(TRITON_INTERPRET=1), which `tests/attention/test_triton_interpreter.py` starts in a process of its own."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from attention.kv_cache.heads import HeadsLayout  # noqa: E402
from attention.metadata import DecodeBatch, Mode, causal_mask, decode_places, token_indices  # noqa: E402
from attention.ops import move_path_triton, slot_mapping_triton  # noqa: E402
from tests.support.attention_cases import uniform_pool  # noqa: E402
from tests.support.triton_interpreter import DEVICE, INTERPRETED, MARKS  # noqa: E402
from workers.ops.vocabulary.largest import NOT_FINITE  # noqa: E402
from workers.ops.vocabulary.largest_triton import largest  # noqa: E402
from workers.ops.vocabulary.topk_log_softmax_triton import topk_log_softmax  # noqa: E402

pytestmark = MARKS


@pytest.mark.parametrize("rows,tail,page_size", [(1, 1, 1), (4, 4, 16), (3, 9, 4), (7, 7, 64)])
def test_rows_of_a_tail_are_where_torch_puts_them(rows: int, tail: int, page_size: int) -> None:
    torch.manual_seed(rows)
    prefix = torch.tensor([0, 3, 17, 54], dtype=torch.int32, device=DEVICE)
    table = torch.randint(0, 90, (4, 80), dtype=torch.int32, device=DEVICE)[:, :70]
    batch = DecodeBatch(Mode.VERIFY, rows, tail, prefix, causal_mask(4, rows, DEVICE), table, 70)
    ours, expected = slot_mapping_triton.decode_places(batch, page_size), decode_places(batch, page_size)
    assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])


@pytest.mark.parametrize("page_size,heads,dim", [(1, 2, 16), (16, 8, 128), (4, 3, 32)])
def test_a_path_moves_to_the_front_as_torch_moves_it(page_size: int, heads: int, dim: int) -> None:
    """Sources and targets overlap, and the pages are in no order."""
    layers, batch, pages = (2, 3, 24) if INTERPRETED else (5, 7, 60)
    generator = torch.Generator().manual_seed(page_size)
    layout = HeadsLayout(heads, dim, torch.float32)
    pool = uniform_pool(layers, pages, page_size, layout, torch.device("cpu"))
    other = uniform_pool(layers, pages, page_size, layout, DEVICE)
    for ours, theirs in zip(other.tensors[0], pool.tensors[0], strict=True):
        ours.copy_(theirs.normal_(generator=generator))
    table = (torch.randperm(pages, generator=generator)[: batch * (pages // batch)] + 1).view(batch, -1).int()
    length = torch.tensor([0, 2, 1, 3, 1, 0, 2][:batch], dtype=torch.int32)
    paths = torch.tensor(
        [[0, 1, 3, 4], [0, 2, 3, 0], [0, 0, 0, 0], [0, 3, 4, 0], [0, 1, 2, 3], [0, 4, 0, 0], [0, 2, 0, 0]]
    )[:batch]
    pool.move_path(table, length, paths)
    move_path_triton.move_path(*other.tensors[0], table.to(DEVICE), length.to(DEVICE), paths.to(DEVICE))
    for b in range(batch):
        kept = int((paths[b] > 0).sum()) + 1
        positions = int(length[b]) + torch.arange(kept).unsqueeze(0)
        where = token_indices(table[b : b + 1], positions, page_size).flatten()
        for ours, theirs in zip(other.tensors[0], pool.tensors[0], strict=True):
            assert torch.equal(
                ours.cpu().view(layers, -1, heads * dim)[:, where], theirs.view(layers, -1, heads * dim)[:, where]
            )


@pytest.mark.parametrize("rows,size", [(1, 128256), (7, 5000), (64, 32000), (3, 17)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_is_the_first_of_the_largest(rows: int, size: int, dtype: torch.dtype) -> None:
    if INTERPRETED and (size > 40000 or dtype == torch.bfloat16):
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
