"""The flashinfer backend's kernels for rounds, with our plans.

FlashInfer's fa2 wrappers (checked with 0.6.17) plan on the host, from lengths on the host. Here
`aerie.kernels.attend.flashinfer_plan_triton` writes the plan on the device, and a copy of the library's wrapper reads
it. The contents of a wrapper are not a stable interface of the library. So at the first pass of each kind FlashInfer
also plans one request, and the start fails if the two plans differ.
"""

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aerie.attention.distribution import pip
from aerie.kernels.attend.flashinfer_plan_triton import TILE_ARRAYS, Grid, PlanArrays, write_mask, write_plan
from aerie.kernels.kv.batches import DecodeBatch, LayerKV

MAX_CUDA_CORE_GROUP = 2  # with 3 or more query heads per KV head, FlashInfer decodes on tensor cores
SAMPLE_PAGES = 300  # pages of the request that FlashInfer also plans; long enough to be split

# The fields of a wrapper's plan, in its order. Fields named like arrays of `PlanArrays` are the offsets of these.
ROWS_PLAN = (
    "padded_batch_size",
    "max_total_num_rows",
    "total_num_rows",
    "cta_tile_q",
    "request",
    "qo_tile",
    "kv_tile",
    "merge_indptr",
    "o_indptr",
    "kv_chunk_size",
    "partial_v",
    "partial_lse",
    "block_valid",
    "enable_cuda_graph",
    "split_kv",
)
DECODE_PLAN = (
    "padded_batch_size",
    "partial_v",
    "partial_lse",
    "request",
    "kv_tile",
    "o_indptr",
    "block_valid",
    "kv_chunk_size",
    "enable_cuda_graph",
    "split_kv",
)

Wrapper = Any  # flashinfer has no types


@dataclass(frozen=True)
class PlanParameters:
    """The parameters of a wrapper's `plan` that all batches of a layer share: sizes, dtypes and scale, no lengths."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    scale: float

    @staticmethod
    def of(q: Tensor, kv: LayerKV, scale: float) -> "PlanParameters":
        page_size, num_kv_heads, head_dim = kv.k.shape[1:]
        return PlanParameters(q.shape[1], num_kv_heads, head_dim, page_size, q.dtype, kv.k.dtype, scale)

    @property
    def queries_per_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.num_heads, self.num_kv_heads, self.head_dim, self.page_size

    @property
    def options(self) -> dict[str, Any]:
        return {"q_data_type": self.dtype, "kv_data_type": self.kv_dtype, "sm_scale": self.scale}


@dataclass(frozen=True)
class Kernel:
    """One of fa2's kernels as FlashInfer plans it, for `rows` rows of each request.

    wrapper: FlashInfer's wrapper; each batch shape gets a copy.
    plan: names of the fields of the wrapper's plan.
    tile_rows: query rows x heads of a KV head in a tile.
    room: maximum tiles per KV head.
    """

    wrapper: Wrapper
    plan: tuple[str, ...]
    heads: PlanParameters
    rows: int
    tile_rows: int
    room: int

    def grid(self, num_requests: int) -> Grid:
        tiles = -(-self.rows * self.heads.queries_per_head // self.tile_rows)
        return Grid(num_requests, self.rows, tiles, self.room, self.heads.page_size)


class RoundPlan:
    """A wrapper that reads its plan from our memory, for batches of one shape.

    kernel: kernel for this number of rows.
    mask: [B, bytes] uint8; None if the mask is causal.
    """

    def __init__(self, kernel: Kernel, batch: DecodeBatch, mask: Tensor | None) -> None:
        num_requests, width = batch.page_table.shape
        device = batch.page_table.device
        self._arrays = PlanArrays(kernel.grid(num_requests), device)
        self._last_page_len = torch.empty(num_requests, dtype=torch.int32, device=device)
        self._mask = mask
        self._wrapper = wrapper = copy(kernel.wrapper)
        steps = torch.arange(num_requests + 1, dtype=torch.int32, device=device)
        wrapper._int_workspace_buffer = self._arrays.ints.view(torch.uint8)
        wrapper._plan_info = plan_info(kernel, self._arrays)
        wrapper._batch_size = num_requests
        wrapper._qo_indptr_last = num_requests * batch.rows
        wrapper._qo_indptr_buf = steps * batch.rows
        wrapper._paged_kv_indptr_buf = steps * width
        wrapper._paged_kv_last_page_len_buf = self._last_page_len
        if mask is not None:
            wrapper._custom_mask_buf = mask.flatten()
            wrapper._mask_indptr_buf = steps * mask.shape[1]

    def write(self, batch: DecodeBatch) -> Wrapper:
        """Write the plan and the masks of `batch`, on the device. Return the wrapper that reads them."""
        width = batch.page_table.shape[1]
        write_plan(self._arrays, batch.prefix_len, batch.suffix_len, width, self._last_page_len)
        if self._mask is not None:
            write_mask(self._mask, batch.mask, batch.prefix_len, batch.suffix_len)
        self._wrapper._paged_kv_indices_buf = batch.page_table.reshape(-1)
        return self._wrapper


def plan_info(kernel: Kernel, arrays: PlanArrays) -> list[int]:
    """Return a wrapper's plan: sizes, and offsets of the arrays and of partial results."""
    grid, heads = arrays.grid, kernel.heads
    values = {name: arrays.byte(name) for name in arrays.begin} | {
        "padded_batch_size": grid.padded,
        "max_total_num_rows": grid.num_requests * grid.rows,
        "cta_tile_q": kernel.tile_rows,
        "partial_v": 0,
        "partial_lse": 4 * heads.num_heads * grid.padded * kernel.tile_rows * heads.head_dim,
        "enable_cuda_graph": 1,  # also launches tiles without work
        "split_kv": int(grid.splits),
    }
    return [values[name] for name in kernel.plan]


def sampled_kernel(workspace: Tensor, heads: PlanParameters, rows: int, causal: bool) -> Kernel:
    """Return the kernel for rounds of `rows` rows, from FlashInfer's plan for one request.

    Raises RuntimeError if our plan for the same request differs, which shows an unsupported version of FlashInfer.
    """
    wrapper, names = _sample(workspace, heads, rows, causal)
    info = dict(zip(names, (int(value) for value in wrapper._plan_info), strict=True))
    kernel = Kernel(wrapper, names, heads, rows, info.get("cta_tile_q", 1), info["padded_batch_size"])
    arrays = PlanArrays(kernel.grid(1), workspace.device)
    prefix_len = torch.tensor([SAMPLE_PAGES * heads.page_size - rows], dtype=torch.int32, device=workspace.device)
    write_plan(arrays, prefix_len, rows, SAMPLE_PAGES, torch.empty_like(prefix_len))
    num_tiles = int(arrays.values("block_valid").sum())
    for name in arrays.begin:
        if name in info:
            ours = arrays.values(name)
            if name in TILE_ARRAYS:
                ours = ours[:num_tiles]  # FlashInfer does not write the rest
            theirs = wrapper._int_workspace_buffer[info[name] :][: ours.nbytes].view(ours.dtype)
            if not torch.equal(ours, theirs):
                import flashinfer

                raise RuntimeError(
                    f"attention backend 'flashinfer': flashinfer {flashinfer.__version__} plans {rows} rows otherwise "
                    f"than 0.6.17 ({name}); {pip('install')} flashinfer-python==0.6.17, or choose triton"
                )
    wrapper._int_workspace_buffer = wrapper._pin_memory_int_workspace_buffer = None  # 8 MiB each
    return kernel


def _sample(workspace: Tensor, heads: PlanParameters, rows: int, causal: bool) -> tuple[Wrapper, tuple[str, ...]]:
    """Return a wrapper that has planned one request of `rows` rows, and the fields of its plan."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

    def buffer(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=workspace.device)

    def host(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    lists = host(0, SAMPLE_PAGES), buffer(SAMPLE_PAGES), host(heads.page_size)
    if rows == 1 and heads.queries_per_head <= MAX_CUDA_CORE_GROUP:
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=False,
            paged_kv_indptr_buffer=buffer(2),
            paged_kv_indices_buffer=buffer(SAMPLE_PAGES),
            paged_kv_last_page_len_buffer=buffer(1),
            backend="fa2",
        )
        wrapper.plan(*lists, *heads.shape, **heads.options)
        return wrapper, DECODE_PLAN
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        use_cuda_graph=True,
        qo_indptr_buf=buffer(2),
        paged_kv_indptr_buf=buffer(2),
        paged_kv_indices_buf=buffer(SAMPLE_PAGES),
        paged_kv_last_page_len_buf=buffer(1),
        backend="fa2",
    )
    wrapper.plan(host(0, rows), *lists, *heads.shape, causal=causal, **heads.options)
    return wrapper, ROWS_PLAN
