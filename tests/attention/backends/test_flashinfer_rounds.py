"""Rounds by FlashInfer's kernels, whose plans are written by ours: a stand-in for the library plans as its scheduler
does and attends, in loops, as its kernels read a plan. Under Triton's interpreter (TRITON_INTERPRET=1); with the
library itself, on a GPU, `test_backend_conformance` compares results."""

import dataclasses
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the plans are written by a Triton kernel; triton is not installed here")

from aerie.attention.backends.flashinfer_rounds import DECODE_PLAN, ROWS_PLAN  # noqa: E402
from aerie.attention.backends.torch_backend import TorchBackend  # noqa: E402
from aerie.attention.registry import build_backend  # noqa: E402
from aerie.kernels.attend.flashinfer_plan_triton import Grid  # noqa: E402
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.kv.batches import Mode  # noqa: E402
from tests.attention.backends.test_flashinfer_plan import planned  # noqa: E402
from tests.support.kernels.attention_cases import (  # noqa: E402
    NUM_KV_HEADS,
    WORKS,
    Shape,
    Work,
    decode_batch,
    random_pool,
    random_rows,
)
from tests.support.kernels.triton_interpreter import INTERPRETED  # noqa: E402

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a GPU has the library itself")
CPU = torch.device("cpu")
ROOM = 12  # tiles for each KV head
PREFIXES = (1, 500, 63, 0, 0)
SHAPE = Shape(head_dim=16, dtype=torch.float32)
ROUNDS = [work for work in WORKS if work.mode is not Mode.PREFILL]


class StandIn:
    """A wrapper of either kind that was made for CUDA graphs."""

    plan_names = ROWS_PLAN
    spoilt: str | None = None  # an array that another version fills otherwise
    made = 0

    def __init__(self, workspace: Tensor, layout: str, **settings: Any) -> None:
        assert layout == "NHD" and settings["use_cuda_graph"] and settings["backend"] == "fa2"
        StandIn.made += 1
        self._custom_mask_buf: Tensor | None = None
        self._causal = False

    def plan(
        self,
        qo_indptr: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        *shape: int,
        causal: bool = False,
        **options: Any,
    ) -> None:
        num_heads, num_kv_heads, _, self.page_size = shape
        self.group, self._causal, self.scale = num_heads // num_kv_heads, causal, options["sm_scale"]
        rows = int(qo_indptr[-1])
        self.tile_rows = 1 if self.plan_names is DECODE_PLAN else 16 if rows * self.group <= 16 else 64
        length = (len(indices) - 1) * self.page_size + int(last_page_len)
        grid = Grid(1, rows, -(-rows * self.group // self.tile_rows), ROOM, self.page_size)
        values = planned(grid, [length])
        if self.spoilt:
            values[self.spoilt][0] += 1
        self._int_workspace_buffer = torch.zeros(1 << 12, dtype=torch.uint8)
        found, end = {"padded_batch_size": ROOM, "cta_tile_q": self.tile_rows}, 64
        for name, listed in values.items():
            kind = torch.uint8 if name == "block_valid" else torch.int32
            content = torch.tensor(listed, dtype=kind).view(torch.uint8)
            self._int_workspace_buffer[end : end + len(content)] = content
            found[name], end = end, end + -(-len(content) // 16) * 16
        self._plan_info = [found.get(name, 0) for name in self.plan_names]

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], out: Tensor, enable_pdl: bool) -> Tensor:
        """As fa2's kernels: pieces first, then each row's pieces together."""
        assert not enable_pdl, "an early launch reads the plan before it is written"
        info = dict(zip(self.plan_names, self._plan_info, strict=True))
        padded, rows = info["padded_batch_size"], self._qo_indptr_last // self._batch_size
        partial: dict[int, tuple[Tensor, Tensor]] = {}
        for tile in range(padded):
            if info["split_kv"] and not self.array(info, "block_valid", padded, torch.uint8)[tile]:
                continue
            request, piece = (int(self.array(info, name, padded)[tile]) for name in ("request", "kv_tile"))
            first = int(self.array(info, "qo_tile", padded)[tile]) * self.tile_rows if "qo_tile" in info else 0
            packed = (
                range(first, min(first + self.tile_rows, rows * self.group))
                if self.tile_rows > 1
                else range(rows * self.group)
            )
            length = self.length(request)
            size = int(self.array(info, "kv_chunk_size", 1)[0]) if info["split_kv"] else length
            low, high = piece * size, min((piece + 1) * size, length)
            begin = int(self.array(info, "o_indptr", self._batch_size + 1)[request])
            num_pieces = -(-length // size)
            for row in sorted({index // self.group for index in packed}):
                found = self.attend(q, kv, request, row, low, high)
                partial[begin + row * num_pieces + piece] = found
        merge = "merge_indptr" if "merge_indptr" in info else "o_indptr"
        steps = self.array(info, merge, len(q) + 1).tolist() if info["split_kv"] else range(len(q) + 1)
        for row in range(len(q)):
            pieces = [partial[index] for index in range(steps[row], steps[row + 1])]
            out[row] = sum(p[0] for p in pieces) / sum(p[1] for p in pieces)  # type: ignore[call-overload]
        return out

    def array(self, info: dict[str, int], name: str, size: int, kind: torch.dtype = torch.int32) -> Tensor:
        return self._int_workspace_buffer[info[name] :][: size * kind.itemsize].view(kind)

    def length(self, request: int) -> int:
        indptr = self._paged_kv_indptr_buf
        return int(
            (indptr[request + 1] - indptr[request] - 1) * self.page_size + self._paged_kv_last_page_len_buf[request]
        )

    def attend(
        self, q: Tensor, kv: tuple[Tensor, Tensor], request: int, row: int, low: int, high: int
    ) -> tuple[Tensor, Tensor]:
        """Sums of weighted values [heads, head_dim] and of weights [heads, 1] over positions low .. high - 1."""
        position = torch.arange(low, high)
        pages = self._paged_kv_indices_buf[int(self._paged_kv_indptr_buf[request]) + position // self.page_size].long()
        k, v = (part[pages, position % self.page_size].repeat_interleave(self.group, 1) for part in kv)
        rows, length = self._qo_indptr_last // self._batch_size, self.length(request)
        seen = position <= length - rows + row if self._causal else torch.ones_like(position, dtype=torch.bool)
        if self._custom_mask_buf is not None:
            bit = row * length + position
            seen = self._custom_mask_buf[int(self._mask_indptr_buf[request]) + bit // 8] >> bit % 8 & 1 == 1
        scores = torch.einsum("hd,nhd->hn", q[int(self._qo_indptr_buf[request]) + row], k) * self.scale
        weights = scores.exp() * seen
        return torch.einsum("hn,nhd->hd", weights, v), weights.sum(1, keepdim=True)

    _batch_size: int
    _qo_indptr_last: int
    _qo_indptr_buf: Tensor
    _paged_kv_indptr_buf: Tensor
    _paged_kv_indices_buf: Tensor
    _paged_kv_last_page_len_buf: Tensor
    _mask_indptr_buf: Tensor


class DecodeStandIn(StandIn):
    plan_names = DECODE_PLAN

    def __init__(self, workspace: Tensor, layout: str, **settings: Any) -> None:
        assert not settings["use_tensor_cores"]
        super().__init__(workspace, layout, **settings)

    def plan(self, indptr: Tensor, *args: Any, **options: Any) -> None:  # type: ignore[override]
        super().plan(torch.tensor([0, 1]), indptr, *args, **options)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("flashinfer")
    package.BatchDecodeWithPagedKVCacheWrapper = DecodeStandIn  # type: ignore[attr-defined]
    package.BatchPrefillWithPagedKVCacheWrapper = StandIn  # type: ignore[attr-defined]
    package.__version__ = "0.9"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setattr(StandIn, "made", 0)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("prefixes", [PREFIXES, (30,) * ROOM], ids=["cut", "whole"])
@pytest.mark.parametrize("work", ROUNDS, ids=lambda work: work.name)
def test_kernels_find_in_the_plan_what_they_must_attend_to(work: Work, prefixes: tuple[int, ...], group: int) -> None:
    torch.manual_seed(0)
    shape = dataclasses.replace(SHAPE, group=group)
    kv = random_pool(shape, 60, CPU).layer(0)
    backend = build_backend("flashinfer", work.mode)
    for lengths in (prefixes, prefixes[::-1], (1,) * len(prefixes)):
        batch = decode_batch(work, shape, lengths, CPU)
        q = random_rows(batch.num_rows, shape, CPU)
        prepared = backend.prepare(batch)
        expected = TorchBackend().prepare(batch).forward(q, kv, ScoreRule(0.2))
        for _ in range(2):
            torch.testing.assert_close(prepared.forward(q, kv, ScoreRule(0.2)), expected, rtol=1e-4, atol=1e-5)
    assert StandIn.made == 1, "the library plans a kind of pass once"
    assert len(backend._masks) == (work.tree), "only trees have masks"  # type: ignore[attr-defined]


def test_shapes_share_one_plan_of_the_library_s() -> None:
    backend = build_backend("flashinfer", Mode.DECODE)
    kv = random_pool(SHAPE, 60, CPU).layer(0)
    for count in (1, 2, 5):
        batch = decode_batch(ROUNDS[0], SHAPE, PREFIXES[:count], CPU)
        backend.prepare(batch).forward(random_rows(count, SHAPE, CPU), kv, ScoreRule(0.2))
    assert StandIn.made == 1


@pytest.mark.parametrize("name", ["kv_tile", "o_indptr", "kv_chunk_size", "merge_indptr"])
def test_a_library_that_plans_otherwise_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "spoilt", name)
    batch = decode_batch(ROUNDS[1], SHAPE, PREFIXES, CPU)
    prepared = build_backend("flashinfer", Mode.VERIFY).prepare(batch)
    kv = random_pool(SHAPE, 60, CPU).layer(0)
    message = rf"flashinfer 0.9 plans 6 rows otherwise than 0.6.17 \({name}\); .*pip install"
    with pytest.raises(RuntimeError, match=message):
        prepared.forward(random_rows(batch.num_rows, SHAPE, CPU), kv, ScoreRule(0.2))


def test_masks_beyond_their_offsets_are_refused() -> None:
    batch = decode_batch(next(work for work in ROUNDS if work.tree), SHAPE, PREFIXES, CPU)
    endless = dataclasses.replace(batch, page_table=batch.page_table[:, :1].expand(-1, 1 << 26))
    prepared = build_backend("flashinfer", batch.mode).prepare(endless)
    kv = random_pool(SHAPE, 60, CPU).layer(0)
    with pytest.raises(ValueError, match="masks of a round take 3 GiB.*lower max_running, .*, or choose triton"):
        prepared.forward(random_rows(batch.num_rows, SHAPE, CPU), kv, ScoreRule(0.2))


def test_layers_of_one_pass_are_alike() -> None:
    batch = decode_batch(ROUNDS[0], SHAPE, PREFIXES, CPU)
    prepared = build_backend("flashinfer", Mode.DECODE).prepare(batch)
    kv, q = random_pool(SHAPE, 60, CPU).layer(0), random_rows(len(PREFIXES), SHAPE, CPU)
    prepared.forward(q, kv, ScoreRule(0.2))
    with pytest.raises(AssertionError, match="layers of a pass differ"):
        prepared.forward(q[:, :NUM_KV_HEADS], kv, ScoreRule(0.2))
