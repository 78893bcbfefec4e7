"""Attention by FlashInfer's paged wrappers (checked with 0.6.17): fa3 for prompt chunks on Hopper, fa2 for the rest.

Its wrappers cut the work on the host, from lengths there. Those of prompt chunks come with the plan, so nothing is
copied; those of a round are on the device, and `prepare` waits for them: `needs_cpu_seq_lens`. No capture.

Each kind of wrapper exists twice and the two take turns: a plan is staged in pinned memory that belongs to its wrapper,
and must have left it before the next plan is written there.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from attention.backend import AttentionBackend, Prepared
from attention.kv_pool import LayerKV
from attention.metadata import ChunkBatch, Mode, TailBatch, to_device

WORKSPACE_BYTES = 128 << 20  # as FlashInfer's documentation has it
# fa2 keeps partial results of 264 tiles of 128 rows x 128 dimensions in float32 for each query head of a KV head
WORKSPACE_BYTES_PER_GROUP = 32 << 20
MAX_CUDA_CORE_GROUP = 2  # from 3 query heads a KV head on, decoding goes through tensor cores

Wrapper = Any  # flashinfer has no types


@dataclass(frozen=True)
class Extent:
    """Rows and lengths of the requests of a batch, on the host. q_lens, kv_lens: rows, and KV positions with those of
    this pass, of each. page_table: [B, max_pages] int32 on the device. causal: rows are the last positions."""

    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    page_table: Tensor
    causal: bool


@dataclass
class _Turn:
    """A wrapper, and the event behind the copy of its last plan to the device."""

    wrapper: Wrapper
    copied: torch.cuda.Event


class FlashInferBackend(AttentionBackend):
    name = "flashinfer"

    def __init__(self) -> None:
        self._turns: dict[tuple[str, torch.device], deque[_Turn]] = {}
        self._workspaces: dict[torch.device, Tensor] = {}

    def prepare(self, batch: TailBatch | ChunkBatch) -> Prepared:
        if isinstance(batch, ChunkBatch):
            q_lens = [end - first for first, end in zip(batch.qo_indptr, batch.qo_indptr[1:], strict=False)]
            kv_lens = [start + n for start, n in zip(batch.starts, q_lens, strict=True)]
            return _Prepared(self, Extent(q_lens, kv_lens, batch.page_table, causal=True), Mode.PREFILL)
        kv_lens = [prefix + batch.tail for prefix in batch.prefix_len.tolist()]  # waits for the GPU
        extent = Extent([batch.rows] * len(kv_lens), kv_lens, batch.page_table, batch.mode is Mode.DRAFT_EXTEND)
        # a single row of a round sees all of its tail: it has no siblings
        masked = batch.rows > 1 and not extent.causal
        return _Prepared(self, extent, batch.mode, packed_mask(batch, kv_lens) if masked else None)

    def turn(self, kind: str, device: torch.device, group: int, make: Callable[[Tensor], Wrapper]) -> _Turn:
        """The wrapper of this kind whose last plan is the older one."""
        turns = self._turns.setdefault((kind, device), deque())
        if len(turns) < 2:
            turns.append(_Turn(make(self._workspace(device, group)), torch.cuda.Event()))  # type: ignore[no-untyped-call]
        else:
            turns.rotate(-1)
        turns[-1].copied.synchronize()  # a plan made two passes ago: long copied unless the host is far ahead
        return turns[-1]

    def _workspace(self, device: torch.device, group: int) -> Tensor:
        """Scratch of all wrappers, which run one after another."""
        if device not in self._workspaces:
            size = max(WORKSPACE_BYTES, group * WORKSPACE_BYTES_PER_GROUP)
            self._workspaces[device] = torch.empty(size, dtype=torch.uint8, device=device)
        return self._workspaces[device]


@dataclass
class _Prepared(Prepared):
    """mask: FlashInfer's packed mask and where each request's bytes begin. wrapper: planned at the first layer."""

    backend: FlashInferBackend
    extent: Extent
    mode: Mode
    mask: tuple[Tensor, Tensor] | None = None
    wrapper: Wrapper = None
    planned: tuple[Any, ...] = field(default=())

    def forward(self, q: Tensor, kv: LayerKV, scale: float) -> Tensor:
        key = (q.shape[1], kv.k.shape, q.dtype, scale)
        if self.wrapper is None:
            self.planned = key
            self.wrapper = self._plan(q, kv, scale)
        assert key == self.planned, "the layers of a pass differ in shape, type or scale"
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.wrapper.run(q, (kv.k, kv.v), out=out)
        return out

    def _plan(self, q: Tensor, kv: LayerKV, scale: float) -> Wrapper:
        page_size, num_kv_heads, head_dim = kv.k.shape[1:]
        group, device = q.shape[1] // num_kv_heads, q.device
        shape = (q.shape[1], num_kv_heads, head_dim, page_size)
        types = {"q_data_type": q.dtype, "kv_data_type": kv.k.dtype, "sm_scale": scale}
        indptr, indices, last_page_len = paged(self.extent, page_size)
        if self.mode is not Mode.PREFILL and max(self.extent.q_lens) == 1:
            tensor_cores = group > MAX_CUDA_CORE_GROUP
            turn = self.backend.turn(f"decode, tensor cores: {tensor_cores}", device, group,
                                     lambda workspace: _decode_wrapper(workspace, tensor_cores))
            turn.wrapper.plan(indptr, indices, last_page_len, *shape, **types)
        else:
            kernel = prefill_kernel(self.mode, device)
            turn = self.backend.turn(kernel, device, group, lambda workspace: _rows_wrapper(workspace, kernel))
            qo_indptr = _pinned([0, *accumulate(self.extent.q_lens)], device)
            packed = None if self.mask is None else self.mask[0]
            turn.wrapper.plan(qo_indptr, indptr, indices, last_page_len, *shape, causal=self.extent.causal,
                              packed_custom_mask=packed, **types)
            if self.mask is not None:
                # 0.6.17 leaves a packed mask's offsets in bits where its kernels count bytes (it converts them only
                # for masks that it packs itself, and that waits for the GPU)
                turn.wrapper._mask_indptr_buf = self.mask[1]
        turn.copied.record()
        return turn.wrapper


def prefill_kernel(mode: Mode, device: torch.device) -> str:
    """"fa3" for prompt chunks on Hopper; it takes no mask, and short rows fill few of its tiles."""
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    return "fa3" if mode is Mode.PREFILL and hopper else "fa2"


def _decode_wrapper(workspace: Tensor, tensor_cores: bool) -> Wrapper:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    return BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores, backend="fa2")


def _rows_wrapper(workspace: Tensor, kernel: str) -> Wrapper:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    return BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernel)


def paged(extent: Extent, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's page lists: indptr [B + 1] and last_page_len [B] int32 on the host, indices int32 on the device:
    each request's pages, one request behind the other. Nothing waits for the device."""
    device, table = extent.page_table.device, extent.page_table
    counts = torch.tensor([-(-length // page_size) for length in extent.kv_lens])
    ends = counts.cumsum(0)
    rows = torch.repeat_interleave(torch.arange(len(counts)), counts)
    column = torch.arange(int(ends[-1])) - (ends - counts)[rows]
    flat = to_device(rows * table.shape[1] + column, device)
    last_page_len = [(length - 1) % page_size + 1 for length in extent.kv_lens]
    return _pinned([0, *ends.tolist()], device), table.flatten()[flat], _pinned(last_page_len, device)


def packed_mask(batch: TailBatch, kv_lens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """FlashInfer's mask of `batch`: packed [bytes] uint8, and starts [B + 1] int32, both on the device.

    Bit r * kv_len + j of a request's bytes says whether its row r sees position j; prefixes are all ones. Each request
    begins at a byte. Nothing waits for the device.
    """
    device = batch.mask.device
    starts = [0, *accumulate(-(-batch.rows * length // 8) for length in kv_lens)]
    packed = torch.full((starts[-1],), 255, dtype=torch.uint8, device=device)
    first = to_device(torch.tensor(starts), device)
    prefix = batch.prefix_len.long().view(-1, 1, 1)
    row = torch.arange(batch.rows, device=device).view(-1, 1)
    column = torch.arange(batch.tail, device=device)
    bit = row * (prefix + batch.tail) + prefix + column
    hidden = ~(batch.mask.unsqueeze(2) >> column) & 1
    # each hidden bit is set once, so subtracting it clears it; 256 - x is -x in eight bits
    cleared = (256 - (hidden << (bit & 7))) & 255
    packed.index_add_(0, (first[:-1].view(-1, 1, 1) + (bit >> 3)).flatten(), cleared.to(torch.uint8).flatten())
    return packed, first.int()


def _pinned(values: Sequence[int], device: torch.device) -> Tensor:
    """[len(values)] int32 on the host, pinned where a GPU copies from it."""
    host = torch.tensor(values, dtype=torch.int32)
    return host.pin_memory() if device.type == "cuda" else host
