"""What the flashinfer backend hands to FlashInfer, seen by a recording stand-in: no GPU, no package. Results are
compared on a GPU by `test_conformance`."""

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.backend import build_backend
from attention.flashinfer_backend import Extent, packed_mask, paged
from attention.metadata import ChunkBatch, Mode, TailBatch
from tests.support.attention_cases import (
    LENGTHS,
    WORKS,
    Shape,
    chunk_batch,
    num_pages,
    random_pool,
    random_rows,
    tail_batch,
)

CPU = torch.device("cpu")
WORK = {work.name: work for work in WORKS}


class RecordingWrapper:
    """Of either kind; `made` lists all of a test."""

    made: list["RecordingWrapper"]

    def __init__(self, workspace: Tensor, layout: str, **settings: Any) -> None:
        assert layout == "NHD" and workspace.dtype == torch.uint8
        self.settings = settings
        self.plans: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._mask_indptr_buf: Tensor | None = None
        RecordingWrapper.made.append(self)

    def plan(self, *args: Any, **kwargs: Any) -> None:
        for tensor in args[:-4]:
            assert tensor.dtype == torch.int32
        self.plans.append((args, kwargs))

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        return out


class NoEvent:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture(autouse=True)
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("flashinfer")
    package.BatchDecodeWithPagedKVCacheWrapper = RecordingWrapper  # type: ignore[attr-defined]
    package.BatchPrefillWithPagedKVCacheWrapper = RecordingWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setattr(torch.cuda, "Event", NoEvent)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    RecordingWrapper.made = []


def planned(batch: TailBatch | ChunkBatch, shape: Shape = Shape(), layers: int = 2) -> RecordingWrapper:  # noqa: B008
    mode = batch.mode if isinstance(batch, TailBatch) else Mode.PREFILL
    kv = random_pool(shape, num_pages(shape.page_size, 16), CPU).layer(0)
    prepared = build_backend("flashinfer", mode).prepare(batch)
    for _ in range(layers):
        prepared.forward(random_rows(batch.num_rows, shape, CPU), kv, 0.125)
    (wrapper,) = RecordingWrapper.made
    assert len(wrapper.plans) == 1, "a pass is planned once, not per layer"
    return wrapper


def test_decoding_plans_totals_and_page_lists() -> None:
    batch = tail_batch(WORK["decode"], Shape(), LENGTHS[0], CPU)
    wrapper = planned(batch)
    assert wrapper.settings == {"use_tensor_cores": True, "backend": "fa2"}
    (indptr, indices, last, *shape), options = wrapper.plans[0]
    assert indptr.tolist() == [0, 1, 3, 7, 20, 84, 85, 86]  # of 2, 18, 64, 201, 1022 tokens, and padding's 1
    assert last.tolist() == [2, 2, 16, 9, 14, 1, 1]
    assert indices.tolist()[1:3] == batch.page_table[1, :2].tolist() and indices.tolist()[-2:] == [0, 0]
    assert shape == [8, 2, 128, 16] and options["sm_scale"] == 0.125


def test_two_heads_a_kv_head_decode_on_cuda_cores() -> None:
    shape = Shape(group=2)
    assert not planned(tail_batch(WORK["decode"], shape, LENGTHS[0], CPU), shape).settings["use_tensor_cores"]


def test_a_chain_s_draft_step_is_plain_decoding() -> None:
    wrapper = planned(tail_batch(WORK["draft_decode a chain"], Shape(), (20, 0), CPU))
    assert wrapper.settings["use_tensor_cores"] and wrapper.plans[0][0][2].tolist() == [7, 3]  # 20 + 3 and 0 + 3 tokens


def test_an_accepted_path_is_causal_and_a_tree_has_a_mask() -> None:
    path = planned(tail_batch(WORK["draft_extend"], Shape(), (20, 0), CPU))
    assert path.plans[0][1]["causal"] and path.plans[0][1]["packed_custom_mask"] is None
    RecordingWrapper.made = []
    batch = tail_batch(WORK["verify a tree"], Shape(), (20, 0), CPU)
    tree = planned(batch)
    assert tree.plans[0][0][0].tolist() == [0, 6, 12] and not tree.plans[0][1]["causal"]
    assert torch.equal(tree.plans[0][1]["packed_custom_mask"], packed_mask(batch, (26, 6))[0])
    assert tree._mask_indptr_buf is not None and tree._mask_indptr_buf.tolist() == [0, 20, 25]  # bytes of 156, 36 bits


def test_prompt_chunks_are_planned_from_the_step_plan_alone() -> None:
    """Their page table may be anywhere: on the meta device no value can be read."""
    host = chunk_batch(Shape(), CPU)
    batch = ChunkBatch(host.qo_indptr, host.starts, host.page_table.to("meta"))
    prepared = build_backend("flashinfer", Mode.PREFILL).prepare(batch)
    assert prepared.extent.kv_lens == [40, 34, 135, 1064]  # type: ignore[attr-defined]
    wrapper = planned(host)
    assert wrapper.settings == {"backend": "fa3"} and wrapper.plans[0][1]["causal"]
    assert wrapper.plans[0][0][0].tolist() == [0, 40, 41, 171, 235]


def test_rounds_read_lengths_on_the_host() -> None:
    batch = tail_batch(WORK["decode"], Shape(), LENGTHS[0], torch.device("meta"))
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        build_backend("flashinfer", Mode.DECODE).prepare(batch)


def test_plans_take_turns_on_two_wrappers() -> None:
    backend = build_backend("flashinfer", Mode.DECODE)
    kv = random_pool(Shape(), num_pages(16, 1), CPU).layer(0)
    for _ in range(5):
        batch = tail_batch(WORK["decode"], Shape(), LENGTHS[0], CPU)
        backend.prepare(batch).forward(random_rows(batch.num_rows, Shape(), CPU), kv, 1.0)
    assert [len(wrapper.plans) for wrapper in RecordingWrapper.made] == [3, 2]


@pytest.mark.parametrize("name", ["verify a tree", "draft_decode a tree"])
def test_packed_masks_show_each_row_its_prefix_and_its_columns(name: str) -> None:
    torch.manual_seed(0)
    batch = tail_batch(WORK[name], Shape(), (1, 17, 0, 40), CPU)
    lengths = [int(n) + batch.tail for n in batch.prefix_len]
    packed, starts = packed_mask(batch, lengths)
    assert starts[-1] == len(packed)
    for b, length in enumerate(lengths):
        mine = packed[int(starts[b]) : int(starts[b + 1])]
        bits = (mine.unsqueeze(1) >> torch.arange(8) & 1).flatten()[: batch.rows * length].view(batch.rows, length)
        prefix = length - batch.tail
        assert bits[:, :prefix].all()
        expected = batch.mask[b].unsqueeze(1) >> torch.arange(batch.tail) & 1
        assert torch.equal(bits[:, prefix:].long(), expected)


def test_page_lists_of_pages_of_one() -> None:
    table = torch.tensor([[4, 2, 9], [7, 0, 0]], dtype=torch.int32)
    indptr, indices, last = paged(Extent([1, 1], [3, 1], table, causal=False), 1)
    assert (indptr.tolist(), indices.tolist(), last.tolist()) == ([0, 3, 4], [4, 2, 9, 7], [1, 1])
