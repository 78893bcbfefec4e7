"""Attention by FlashInfer's TensorRT-LLM decode kernels (checked with 0.6.17). Every length is read on the device, so a
captured graph stays valid when lengths, page tables and masks change.

Keys and values per head (`trtllm_batch_decode_with_kv_cache`): XQA on compute capability 9.x and 12.x, with tree masks;
trtllm-gen on 10.x, causal. These kernels require, in every mode, eager or captured:
- lengths include the rows of this pass;
- every request has the same number of rows, and no length is below it. This includes padding requests, whose prefix is
  0 and whose pages are the dummy page;
- a graph has one width of page tables, because XQA's number of splits follows it.
XQA is compiled for each number of rows, so a shape must run once before it is captured.

Latent rows (`trtllm_batch_decode_with_kv_cache_mla`): trtllm-gen on 10.x, XQA on 12.x. Not run on a device yet: tests
compare a stand-in that follows the documentation (`tests.support.kernels.flashinfer_mla`). Each row of a pass is passed
to the library as a request of one row, because XQA takes only one, and because the documentation does not say which
masks several rows have. The length of that request is what its row sees, so a chain needs no mask. The rows of a tree
attend to their common prefix, with log-sum-exps, and our kernel adds the masked columns
(`aerie.kernels.attend.latent_suffix_triton`). XQA returns no log-sum-exps, so trees are refused there. Buffers of a
shape are allocated at its first pass, and are never freed, because captured graphs hold their addresses."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aerie.attention.backend import AttentionBackend, Prepared, assert_not_captured
from aerie.attention.limits import TRTLLM_GEN_MAJOR, TRTLLM_LATENTS
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.capability import num_multiprocessors
from aerie.kernels.kv.batches import DecodeBatch, LatentKV, LayerKV, Mode, PrefillBatch, causal_mask

WORKSPACE_BYTES = 128 << 20  # XQA's semaphores are the first 8 MiB
STATS_BYTES = 8 * 256  # bytes per row and head: maximum and sum for each of 256 rows, the library's limit per request
STATS_GUARD_BYTES = 1 << 20
LATENT_COUNTER_BYTES = 4  # bytes, times the larger of rows x heads and multiprocessors
COUNTER_ALIGNMENT = 8  # counters
XQA_TABLE_TOKENS = 128  # XQA's page tables must cover a multiple of this many tokens

LatentAttend = Callable[..., Any]


@dataclass(frozen=True)
class LatentBuffers:
    """Buffers shared by passes of one shape. n: rows of the pass.

    lengths: [n] int32, tokens that each row sees.
    offsets: [R] int32, tokens after the prefix that a chain's rows see; None for a tree.
    tables: [n, pages] int32, the page table of each row; None if the batch's own is used.
    empty: [n, 1] bool, whether a row has no prefix.
    lse: [n, heads] float32. None without log-sum-exps.
    workspace, counters: uint8, zero before their first launch; every launch resets its semaphores to zero.
    """

    lengths: Tensor
    offsets: Tensor | None
    tables: Tensor | None
    empty: Tensor | None
    lse: Tensor | None
    workspace: Tensor
    counters: Tensor


@dataclass
class LatentRows:
    """The buffers of one backend, named `name`."""

    name: str
    _buffers: dict[tuple[Any, ...], LatentBuffers] = field(default_factory=dict)
    _scratch: dict[tuple[torch.device, str], Tensor] = field(default_factory=dict)
    _outgrown: list[Tensor] = field(default_factory=list)
    _attend: LatentAttend | None = None

    def written(self, batch: DecodeBatch, q: Tensor, kv: LatentKV) -> LatentBuffers:
        """Return the buffers of a pass, filled on the device. q: [n, heads, latent + rotated]; only its shape is
        read."""
        page_size, is_tree = kv.rows.shape[1], not batch.is_causal
        key = (q.device, batch.page_table.shape, batch.rows, q.shape[1], page_size, batch.suffix_len, is_tree)
        if key not in self._buffers:
            assert_not_captured(self.name, q.device)
            self._buffers[key] = self._made(batch, q, page_size, is_tree)
        buffers, rows = self._buffers[key], batch.rows
        lengths = buffers.lengths.view(-1, rows)
        if buffers.offsets is None:
            assert buffers.empty is not None
            # at least 1: the library does not accept 0
            torch.clamp_min(batch.prefix_len.unsqueeze(1).expand(-1, rows), 1, out=lengths)
            torch.eq(batch.prefix_len.unsqueeze(1).expand(-1, rows), 0, out=buffers.empty.view(-1, rows))
        else:
            torch.add(batch.prefix_len.unsqueeze(1), buffers.offsets, out=lengths)
        if buffers.tables is not None:
            num_requests, width = batch.page_table.shape
            tables = buffers.tables.view(num_requests, rows, -1)[..., :width]
            tables.copy_(batch.page_table.unsqueeze(1).expand(-1, rows, -1))
        return buffers

    def attend(self) -> LatentAttend:
        """FlashInfer's function, imported at its first use."""
        if self._attend is None:
            from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla

            self._attend = trtllm_batch_decode_with_kv_cache_mla
        return self._attend

    def _made(self, batch: DecodeBatch, q: Tensor, page_size: int, is_tree: bool) -> LatentBuffers:
        """Allocate the buffers of a pass over `batch.rows` rows per request. A tree attends to the prefix alone,
        without the rows' masks; `add_suffix` adds the rest, for which log-sum-exps are needed."""
        device, (rows, heads), width = q.device, q.shape[:2], batch.page_table.shape[1]
        is_xqa = kernel_on(device) == "xqa"
        if is_xqa:
            width = -(-width * page_size // XQA_TABLE_TOKENS) * XQA_TABLE_TOKENS // page_size
        is_copied = batch.rows > 1 or width != batch.page_table.shape[1] or not batch.page_table.is_contiguous()
        first = batch.suffix_len - batch.rows + 1
        offsets = torch.arange(first, batch.suffix_len + 1, dtype=torch.int32, device=device)
        stats = STATS_GUARD_BYTES + STATS_BYTES * rows * heads if is_tree else 0
        multiprocessors = num_multiprocessors(device)
        counters = -(-max(rows * heads, multiprocessors) // COUNTER_ALIGNMENT) * COUNTER_ALIGNMENT
        return LatentBuffers(
            lengths=torch.ones(rows, dtype=torch.int32, device=device),
            offsets=None if is_tree else offsets,
            tables=torch.zeros((rows, width), dtype=torch.int32, device=device) if is_copied else None,
            empty=torch.zeros((rows, 1), dtype=torch.bool, device=device) if is_tree else None,
            lse=torch.empty((rows, heads), dtype=torch.float32, device=device) if is_tree else None,
            workspace=self._zeros("workspace", WORKSPACE_BYTES + stats, device),
            counters=self._zeros("counters", LATENT_COUNTER_BYTES * counters, device),
        )

    def _zeros(self, what: str, num_bytes: int, device: torch.device) -> Tensor:
        """Return zeroed scratch memory, at least num_bytes. All passes share it, because they run one after another."""
        held = self._scratch.get((device, what))
        if held is None or held.numel() < num_bytes:
            self._outgrown += [] if held is None else [held]
            held = self._scratch[device, what] = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return held


class PreparedLatentRows(Prepared):
    """A prepared pass. The first layer writes the buffers, because heads and page size are unknown before."""

    def __init__(self, latent: LatentRows, batch: DecodeBatch) -> None:
        self._latent, self._batch = latent, batch
        self._buffers: LatentBuffers | None = None

    def plan(self, q: Tensor, kv: LatentKV, rule: ScoreRule) -> bool:
        if self._buffers is None:
            self._buffers = self._latent.written(self._batch, q, kv)
        return True

    def forward(self, q: Tensor, kv: LatentKV, rule: ScoreRule, sinks: Tensor | None = None) -> Tensor:
        self.plan(q, kv, rule)
        assert self._buffers is not None
        batch, buffers, kernel = self._batch, self._buffers, kernel_on(q.device)
        tables = batch.page_table if buffers.tables is None else buffers.tables
        only: dict[str, Any] = {} if kernel == "xqa" else {"multi_ctas_kv_counter_buffer": buffers.counters}
        if buffers.lse is not None:
            only |= {"lse": buffers.lse, "return_lse": True}
        rotated = q.shape[2] - kv.latent
        attended = self._latent.attend()(
            query=q.contiguous().unsqueeze(1),
            kv_cache=kv.rows,
            workspace_buffer=buffers.workspace,
            qk_nope_head_dim=TRTLLM_LATENTS[kv.latent, rotated],
            kv_lora_rank=kv.latent,
            qk_rope_head_dim=rotated,
            block_tables=tables,
            seq_lens=buffers.lengths,
            max_seq_len=tables.shape[1] * kv.rows.shape[1],
            bmm1_scale=rule.scale,
            bmm2_scale=1.0,
            enable_pdl=None,  # the library decides by device
            backend=kernel,
            **only,
        )
        if buffers.lse is None:
            return attended.view(*q.shape[:2], kv.latent)  # type: ignore[no-any-return]
        from aerie.kernels.attend.latent_suffix_triton import add_suffix  # needs Triton; chains do not

        assert buffers.empty is not None
        out: Tensor = attended[0].view(*q.shape[:2], kv.latent)
        buffers.lse.masked_fill_(buffers.empty, float("-inf"))  # these rows saw only the dummy page
        add_suffix(out, buffers.lse, q, kv, batch, rule.scale)  # base 2, as trtllm-gen returns them
        return out


def kernel_on(device: torch.device) -> str:
    """Return the library's name for this GPU's kernels."""
    return "trtllm-gen" if torch.cuda.get_device_capability(device)[0] == TRTLLM_GEN_MAJOR else "xqa"


COUNTER_BYTES = 1 << 20  # trtllm-gen needs four bytes per request and query head
WORD_BITS = 16  # mask bits per word that the kernel reads
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
    """TensorRT-LLM's kernels in FlashInfer (trtllm-gen, XQA), for rounds. Owns each device's workspace and the
    masks."""

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

    def tree_mask_buffer(self, num_requests: int, rows: int, device: torch.device) -> Tensor | None:
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
        """Return the kernel and its scratch memory on a device, allocated at the first use."""
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
        """Return the prepared pass for this kind of KV, which the first layer decides."""
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
