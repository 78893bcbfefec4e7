"""Attention by FlashInfer's TensorRT-LLM decode kernels (`trtllm_batch_decode_with_kv_cache`, checked with 0.6.17):
XQA on compute capability 9.x and 12.x, with tree masks; trtllm-gen on 10.x, causal. Every length is read on the device,
so a captured graph stays valid when lengths, page tables and masks change. Latent rows have kernels of their own
(`aerie.attention.backends.trtllm_latent`).

The kernels require, in every mode, eager or captured:
- lengths include the rows of this pass;
- every request has the same number of rows, and no length is below it. This includes padding requests, whose prefix is
  0 and whose pages are the dummy page;
- a graph has one width of page tables, because XQA's number of splits follows it.

XQA is compiled for each number of rows, so a shape must run once before it is captured.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.attention.backend import AttentionBackend, Prepared, assert_not_captured
from aerie.attention.backends.trtllm_latent import WORKSPACE_BYTES, LatentRows, PreparedLatentRows, kernel_on
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.kv.batches import DecodeBatch, Mode, PrefillBatch, causal_mask
from aerie.kernels.kv.views import LatentKV, LayerKV

COUNTER_BYTES = 1 << 20  # trtllm-gen needs four bytes per request and query head
WORD_BITS = 16
ROW_ALIGNMENT = 2  # words: rows of a mask begin at multiples of 32 bits

Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class Device:
    """State of the backend on one device.

    attend: FlashInfer's function.
    kernel: the kernel that it runs.
    workspace, counters: uint8, zero before the first launch; every launch resets its semaphores to zero.
    """

    attend: Attend
    kernel: str
    workspace: Tensor
    counters: Tensor


class TrtllmBackend(AttentionBackend):
    name = "trtllm"

    def __init__(self) -> None:
        self._devices: dict[torch.device, Device] = {}
        self._masks: dict[tuple[torch.device, Mode, int, int], Tensor] = {}
        self.latent = LatentRows(self.name)

    def prepare(self, batch: DecodeBatch | PrefillBatch) -> Prepared:
        assert isinstance(batch, DecodeBatch), "refused at the start: no prompt chunks"
        return _PreparedRound(self, batch)

    def prepare_heads(self, batch: DecodeBatch) -> Prepared:
        """Prepare a pass over K/V heads."""
        device = self._device(batch.prefix_len.device)
        return _PreparedHeads(device, batch, batch.prefix_len + batch.suffix_len, self._mask(batch, device.kernel))

    def _mask(self, batch: DecodeBatch, kernel: str) -> Tensor | None:
        """Return the mask words of `batch`, in a buffer that is never freed; None if rows see all positions before
        them."""
        if batch.rows == 1:
            return None  # a single row sees all positions before it, in every mode
        if batch.mode is Mode.DRAFT_DECODE or batch.suffix_len != batch.rows:
            raise ValueError(
                f"attention backend 'trtllm': {batch.mode.value} with {batch.rows} rows that see "
                f"{batch.suffix_len} columns; its masks are as wide as the rows of a pass"
            )
        if kernel == "trtllm-gen":
            return None  # causal; a tree is refused at the start
        if batch.mode is Mode.DRAFT_EXTEND:
            return self._causal_words(batch)
        if batch.mask_words is not None:
            return batch.mask_words
        buffer = self._words(Mode.VERIFY, batch.num_requests, batch.rows, batch.mask.device)
        buffer.copy_(mask_words(batch.mask))
        return buffer

    def verify_buffer(self, num_requests: int, rows: int, device: torch.device) -> Tensor | None:
        """Return the buffer of masks that the kernel reads: four bytes a row up to 32 rows. It is never freed, because
        captured graphs hold its address."""
        if rows == 1 or kernel_on(device) == "trtllm-gen":
            return None  # the kernels read no mask, or (over latent rows) `DecodeBatch.mask`
        return self._words(Mode.VERIFY, num_requests, rows, device)

    def _causal_words(self, batch: DecodeBatch) -> Tensor:
        """Return the causal mask of an accepted path. It is the same in every pass, so it is written once."""
        device = batch.prefix_len.device
        if (device, Mode.DRAFT_EXTEND, batch.num_requests, batch.rows) not in self._masks:
            buffer = self._words(Mode.DRAFT_EXTEND, batch.num_requests, batch.rows, device)
            buffer.copy_(mask_words(causal_mask(batch.num_requests, batch.rows, device)))
        return self._words(Mode.DRAFT_EXTEND, batch.num_requests, batch.rows, device)

    def _words(self, mode: Mode, num_requests: int, rows: int, device: torch.device) -> Tensor:
        key = (device, mode, num_requests, rows)
        if key not in self._masks:
            assert_not_captured(self.name, device)
            self._masks[key] = torch.empty((num_requests, rows, words_of(rows)), dtype=torch.uint16, device=device)
        return self._masks[key]

    def _device(self, device: torch.device) -> Device:
        if device not in self._devices:
            assert_not_captured(self.name, device)
            from flashinfer.decode import trtllm_batch_decode_with_kv_cache

            kernel = kernel_on(device)
            workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            counters = torch.zeros(COUNTER_BYTES, dtype=torch.uint8, device=device)
            self._devices[device] = Device(trtllm_batch_decode_with_kv_cache, kernel, workspace, counters)
        return self._devices[device]


class _PreparedRound(Prepared):
    """A pass. Its first layer shows whether KV is K/V heads or latent rows, which is the same in all layers."""

    def __init__(self, backend: TrtllmBackend, batch: DecodeBatch) -> None:
        self._backend, self._batch = backend, batch
        self._prepared: Prepared | None = None

    def plan(self, q: Tensor, kv: LayerKV | LatentKV, rule: ScoreRule) -> bool:
        return self._of(kv).plan(q, kv, rule)

    def forward(self, q: Tensor, kv: LayerKV | LatentKV, rule: ScoreRule, sinks: Tensor | None = None) -> Tensor:
        return self._of(kv).forward(q, kv, rule)

    def _of(self, kv: LayerKV | LatentKV) -> Prepared:
        if self._prepared is None:
            if isinstance(kv, LatentKV):
                self._prepared = PreparedLatentRows(self._backend.latent, self._batch)
            else:
                self._prepared = self._backend.prepare_heads(self._batch)
        return self._prepared


@dataclass(frozen=True)
class _PreparedHeads(Prepared):
    """A pass over K/V heads.

    lengths: [B] int32, including this pass's rows.
    mask: [B, R, words] uint16 or None.
    """

    device: Device
    batch: DecodeBatch
    lengths: Tensor
    mask: Tensor | None

    def forward(self, q: Tensor, kv: LayerKV, rule: ScoreRule, sinks: Tensor | None = None) -> Tensor:
        batch, device = self.batch, self.device
        page_size = kv.k.shape[1]
        only = {"multi_ctas_kv_counter_buffer": device.counters} if device.kernel == "trtllm-gen" else {}
        return device.attend(
            query=q.contiguous(),  # the kernels have no row stride argument, and q is a slice of the QKV product
            kv_cache=(kv.k, kv.v),
            workspace_buffer=device.workspace,
            block_tables=batch.page_table,
            seq_lens=self.lengths,
            max_seq_len=batch.page_table.shape[1] * page_size,
            bmm1_scale=rule.scale,
            bmm2_scale=1.0,
            kv_layout="NHD",
            enable_pdl=None,  # the library decides by device
            backend=device.kernel,
            q_len_per_req=batch.rows,
            mask=self.mask,
            **only,
        ).view(q.shape)


def words_of(rows: int) -> int:
    """Return the number of 16-bit words in a mask row over `rows` columns."""
    return -(-rows // (WORD_BITS * ROW_ALIGNMENT)) * ROW_ALIGNMENT


def mask_words(mask: Tensor) -> Tensor:
    """Return a [B, R, words] uint16 view of mask [B, R] int64: the low words of each row, lowest column first. Assumes
    little-endian memory."""
    rows = mask.shape[1]
    return mask.contiguous().view(torch.uint16).view(mask.shape[0], rows, 4)[..., : words_of(rows)]
