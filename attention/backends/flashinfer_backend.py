"""Attention by FlashInfer's paged wrappers (checked with 0.6.17): fa3 for prompt chunks on Hopper, fa2 for everything
else. FP8 KV also uses fa2, because fa3 accepts it only with FP8 queries; fa2 converts FP8 to the queries' dtype, and
sums in float32. Rounds over latent rows are in `aerie.attention.backends.flashinfer_latent`.

The wrappers split the work on the host, from lengths on the host. For prompt chunks the step's plan has these lengths,
so nothing is copied. For rounds the lengths are on the device, so our kernel splits the work there, in FlashInfer's
format (`aerie.attention.backends.flashinfer_rounds`). Nothing waits for the GPU, and a captured graph stays valid when
lengths, page tables and masks change.

There are two wrappers for prompt chunks, used alternately: a plan is staged in the wrapper's pinned memory, and must
have been copied from there before the next plan is written.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from aerie.attention.backend import AttentionBackend, Prepared, assert_not_captured
from aerie.attention.backends.flashinfer_latent import LatentRounds, PreparedLatentRound
from aerie.attention.backends.flashinfer_rounds import Kernel, PlanParameters, RoundPlan, Wrapper, sampled_kernel
from aerie.kernels.attend.flashinfer_plan_triton import mask_bytes
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.kv.batches import DecodeBatch, LatentKV, LayerKV, PrefillBatch
from aerie.kernels.kv.stored_values import FP8
from aerie.kernels.to_device import pinned, to_device

WORKSPACE_BYTES = 128 << 20  # as in FlashInfer's documentation
# fa2 keeps partial results of 264 tiles of 128 rows x 128 dimensions in float32 for each query head of a KV head
WORKSPACE_BYTES_PER_GROUP = 32 << 20


@dataclass(frozen=True)
class Extent:
    """The n nonempty prompt chunks of a pass, on the host.

    chunks: [n] their rows of the page table.
    q_lens: [n] rows of each chunk.
    kv_lens: [n] KV positions of each chunk, including those of this pass.
    page_table: [C, max_pages] int32 on the device.
    """

    chunks: Sequence[int]
    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    page_table: Tensor

    @staticmethod
    def of(batch: PrefillBatch) -> "Extent":
        starts, counts = batch.host_lists.starts, batch.host_lists.counts
        chunks = [c for c, count in enumerate(counts) if count]
        lengths = [starts[c] + counts[c] for c in chunks]
        return Extent(chunks, [counts[c] for c in chunks], lengths, batch.page_table)


@dataclass
class _PrefillWrapper:
    """A wrapper for prompt chunks, and the event after the copy of its last plan to the device."""

    wrapper: Wrapper
    copied: torch.cuda.Event


class FlashInferBackend(AttentionBackend):
    """FlashInfer's kernels for prompt chunks and rounds. Owns their wrappers, workspaces, plans and masks, which all
    layers share."""

    name = "flashinfer"

    def __init__(self) -> None:
        self._prefill_wrappers: dict[tuple[torch.device, str], deque[_PrefillWrapper]] = {}
        self._workspaces: dict[torch.device, Tensor] = {}
        self._kernels: dict[tuple[torch.device, PlanParameters, int, bool], Kernel] = {}
        self._rounds: dict[tuple[Any, ...], RoundPlan] = {}
        self._masks: dict[torch.device, Tensor] = {}
        self.latent_rounds = LatentRounds(self.name)

    def prepare(self, batch: DecodeBatch | PrefillBatch) -> Prepared:
        if isinstance(batch, DecodeBatch):
            return _PreparedRound(self, batch)
        return _PreparedPrefill(self, Extent.of(batch))

    def prefill_wrapper(self, device: torch.device, heads: PlanParameters) -> _PrefillWrapper:
        """Return the wrapper for prompt chunks that was not used last."""
        kernel = prefill_kernel(device, heads.kv_dtype)
        wrappers = self._prefill_wrappers.setdefault((device, kernel), deque())
        if len(wrappers) < 2:
            from flashinfer import BatchPrefillWithPagedKVCacheWrapper

            workspace = self._workspace(device, heads.queries_per_head)
            wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernel)
            wrappers.append(_PrefillWrapper(wrapper, torch.cuda.Event()))  # type: ignore[no-untyped-call]
        else:
            wrappers.rotate(-1)
        wrappers[-1].copied.synchronize()  # its last plan is two passes old, and copied unless the host is far ahead
        return wrappers[-1]

    def round_plan(self, batch: DecodeBatch, heads: PlanParameters) -> RoundPlan:
        """Return the buffers for all passes of this shape. They are never freed, because captured graphs hold their
        addresses."""
        device = batch.prefix_len.device
        causal = batch.rows > 1 and batch.is_causal  # FlashInfer plans its kernels for one row without the causal flag
        key = (device, heads, batch.rows, causal, batch.page_table.shape)
        if key not in self._rounds:
            assert_not_captured(self.name, device)
            kernel = self._kernel(device, heads, batch.rows, causal)
            mask = None if batch.is_causal else self._mask(batch, heads.page_size)
            self._rounds[key] = RoundPlan(kernel, batch, mask)
        return self._rounds[key]

    def _workspace(self, device: torch.device, group: int) -> Tensor:
        """Return the scratch memory of all wrappers, which run one after another."""
        if device not in self._workspaces:
            size = max(WORKSPACE_BYTES, group * WORKSPACE_BYTES_PER_GROUP)
            self._workspaces[device] = torch.empty(size, dtype=torch.uint8, device=device)
        return self._workspaces[device]

    def _kernel(self, device: torch.device, heads: PlanParameters, rows: int, causal: bool) -> Kernel:
        key = (device, heads, rows, causal)
        if key not in self._kernels:
            self._kernels[key] = sampled_kernel(self._workspace(device, heads.queries_per_head), heads, rows, causal)
        return self._kernels[key]

    def _mask(self, batch: DecodeBatch, page_size: int) -> Tensor:
        """Return a view of the memory for masks, [B, bytes] uint8. All shapes share it, because each pass writes its
        masks before it reads them. FlashInfer's masks have a bit for each row and position, including the prefix, and
        int32 offsets."""
        device = batch.prefix_len.device
        num_requests, width = batch.page_table.shape
        request_bytes = mask_bytes(batch.rows, width * page_size)
        num_bytes = num_requests * request_bytes
        if num_bytes >= 1 << 31:
            raise ValueError(
                f"attention backend 'flashinfer': the masks of a round take {num_bytes >> 30} GiB, 2 are "
                "too many; lower max_running, max_model_len or num_draft_tokens, or choose triton"
            )
        if device not in self._masks or self._masks[device].shape[0] < num_bytes:
            self._masks[device] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._masks[device][:num_bytes].view(num_requests, request_bytes)


class _Prepared(Prepared):
    """A pass. Its first layer splits the work, because heads and page size are known only there."""

    def __init__(self, backend: FlashInferBackend) -> None:
        self.backend = backend
        self._heads: PlanParameters | None = None
        self._run: Callable[..., object]

    def plan(self, q: Tensor, kv: LayerKV, rule: ScoreRule) -> bool:
        heads = PlanParameters.of(q, kv, rule.scale)
        if self._heads is None:
            self._run = self._plan(heads)
            self._heads = heads
        assert heads == self._heads, "the layers of a pass differ in shape, type or scale"
        return True

    def forward(self, q: Tensor, kv: LayerKV, rule: ScoreRule, sinks: Tensor | None = None) -> Tensor:
        self.plan(q, kv, rule)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        # its kernels read the plan before they wait: see `aerie.kernels.pdl`
        self._run(q, (kv.k, kv.v), out=out, enable_pdl=False, **scales_of(kv))
        return out

    @abstractmethod
    def _plan(self, heads: PlanParameters) -> Callable[..., object]:
        """Return the planned wrapper's `run`."""


class _PreparedPrefill(_Prepared):
    def __init__(self, backend: FlashInferBackend, extent: Extent) -> None:
        super().__init__(backend)
        self.extent = extent

    def forward(self, q: Tensor, kv: LayerKV, rule: ScoreRule, sinks: Tensor | None = None) -> Tensor:
        num_rows = sum(self.extent.q_lens)
        out = super().forward(q[:num_rows], kv, rule)
        padding = q.shape[0] - num_rows
        return torch.cat((out, out.new_zeros((padding, *out.shape[1:])))) if padding else out

    def _plan(self, heads: PlanParameters) -> Callable[..., object]:
        device = self.extent.page_table.device
        prefill_wrapper = self.backend.prefill_wrapper(device, heads)
        qo_indptr = _pinned([0, *accumulate(self.extent.q_lens)], device)
        prefill_wrapper.wrapper.plan(
            qo_indptr, *paged(self.extent, heads.page_size), *heads.shape, causal=True, **heads.options
        )
        prefill_wrapper.copied.record()
        run: Callable[..., object] = prefill_wrapper.wrapper.run
        return run


class _PreparedRound(_Prepared):
    def __init__(self, backend: FlashInferBackend, batch: DecodeBatch) -> None:
        super().__init__(backend)
        self.batch = batch
        self._latent = PreparedLatentRound(backend.latent_rounds, batch)

    def plan(self, q: Tensor, kv: LayerKV | LatentKV, rule: ScoreRule) -> bool:
        return self._latent.plan(q, kv, rule) if isinstance(kv, LatentKV) else super().plan(q, kv, rule)

    def forward(self, q: Tensor, kv: LayerKV | LatentKV, rule: ScoreRule, sinks: Tensor | None = None) -> Tensor:
        return self._latent.forward(q, kv, rule) if isinstance(kv, LatentKV) else super().forward(q, kv, rule)

    def _plan(self, heads: PlanParameters) -> Callable[..., object]:
        run: Callable[..., object] = self.backend.round_plan(self.batch, heads).write(self.batch).run
        return run


def scales_of(kv: LayerKV) -> dict[str, float]:
    """Return arguments of `run`, without scales of 1. k_scale is folded into the factor on q . k; v_scale costs another
    kernel, which multiplies the output."""
    scales = {"k_scale": kv.k_scale, "v_scale": kv.v_scale}
    return {name: scale for name, scale in scales.items() if scale != 1.0}


def prefill_kernel(device: torch.device, kv_dtype: torch.dtype) -> str:
    """Return the kernel for prompt chunks: "fa3" on Hopper, except over FP8. Rounds use "fa2": fa3 has no masks, and
    they would fill few rows of its tiles."""
    return "fa3" if torch.cuda.get_device_capability(device)[0] == 9 and kv_dtype != FP8 else "fa2"


def paged(extent: Extent, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return FlashInfer's page lists: indptr [n + 1] and last_page_len [n], int32 on the host, and indices, int32 on
    the device, the chunks' pages one after the other. Does not wait for the device."""
    device, table = extent.page_table.device, extent.page_table
    counts = torch.tensor([-(-length // page_size) for length in extent.kv_lens])
    ends = counts.cumsum(0)
    chunk = torch.repeat_interleave(torch.arange(len(counts)), counts)
    column = torch.arange(int(ends[-1])) - (ends - counts)[chunk]
    flat = to_device(torch.tensor(extent.chunks)[chunk] * table.shape[1] + column, device)
    last_page_len = [(length - 1) % page_size + 1 for length in extent.kv_lens]
    return _pinned([0, *ends.tolist()], device), table.flatten()[flat], _pinned(last_page_len, device)


def _pinned(values: Sequence[int], device: torch.device) -> Tensor:
    """Return [len(values)] int32 on the host, pinned if a GPU copies from it."""
    return pinned(torch.tensor(values, dtype=torch.int32), device)
