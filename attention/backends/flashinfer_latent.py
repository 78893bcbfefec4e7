"""Rounds over latent rows by FlashInfer's fa3 kernel for Hopper (checked with 0.6.17), with our plans.

FlashInfer plans on the host, from lengths on the host. Here `aerie.kernels.attend.flashinfer_latent_plan_triton` writes
the plan on the device, and the library's compiled kernel is called with it. That kernel has no masks but the causal
one. For a tree it attends to the prefix, which all rows see, and our kernel adds the masked columns.

The format of a plan is not a stable interface of the library. So the first pass of each kind also attends to one
request with a plan of FlashInfer, and the start fails if the results differ.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aerie.attention.backend import Prepared, assert_not_captured
from aerie.attention.distribution import pip
from aerie.kernels.attend.flashinfer_latent_plan_triton import LatentGrid, LatentPlanArrays, write_latent_plan
from aerie.kernels.attend.latent_suffix_triton import add_suffix
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.capability import Capability, num_multiprocessors
from aerie.kernels.kv.batches import DecodeBatch, LatentKV

SAMPLE_TOKENS = 3000  # tokens of the request that FlashInfer also plans; long enough to be split
# Partial results are rounded to the rows' dtype, and the two plans split at different tokens.
TOLERANCE = 2.0**-6

Module = Any  # flashinfer has no types


@dataclass
class LatentRounds:
    """The plans and workspaces of one backend. Captured graphs hold their addresses, so they are never freed, except a
    workspace that becomes too small before its first capture."""

    name: str
    _plans: dict[tuple[Any, ...], "LatentRoundPlan"] = field(default_factory=dict)
    _workspaces: dict[torch.device, list[Tensor]] = field(default_factory=dict)
    _checked: set[tuple[Any, ...]] = field(default_factory=set)

    def plan(self, batch: DecodeBatch, q: Tensor, kv: LatentKV, scale: float) -> "LatentRoundPlan":
        """Return the buffers shared by all passes of this shape."""
        device = q.device
        key = (device, q.dtype, q.shape, kv.rows.shape[1:], kv.latent, batch.is_causal, batch.page_table.shape, scale)
        if key not in self._plans:
            assert_not_captured(self.name, device)
            multiprocessors = num_multiprocessors(device)
            grid = LatentGrid(batch.num_requests, batch.rows, q.shape[1], multiprocessors, batch.is_causal)
            module = _module(q.dtype, kv)
            workspace = self.workspace(grid.max_partial_rows * (kv.latent * q.itemsize + 4), device)
            plan = LatentRoundPlan(module, grid, workspace, scale, device, kv.latent * q.itemsize)
            kind = (device, q.dtype, q.shape[1:], batch.rows, kv.rows.shape[1:], kv.latent, grid.causal)
            if kind not in self._checked:
                _check(module, grid, q, kv, scale)
                self._checked.add(kind)
            self._plans[key] = plan
        return self._plans[key]

    def workspace(self, num_bytes: int, device: torch.device) -> Tensor:
        """Return memory for partial results, uint8, at least num_bytes. All plans share it, because they run one after
        another."""
        held = self._workspaces.setdefault(device, [])
        if not held or held[-1].numel() < num_bytes:
            held.append(torch.empty(num_bytes, dtype=torch.uint8, device=device))
        return held[-1]


class LatentRoundPlan:
    """The kernel, and its plan in device memory that `write` fills, for batches of one shape."""

    def __init__(
        self, module: Module, grid: LatentGrid, workspace: Tensor, scale: float, device: torch.device, row_bytes: int
    ) -> None:
        """row_bytes: of a partial result: latent size x bytes of a number. Log-sum-exps follow them in `workspace`."""
        self._module, self._workspace, self._scale = module, workspace, scale
        self._arrays = LatentPlanArrays(grid, device)
        self._info = self._arrays.plan_info(partial_lse=grid.max_partial_rows * row_bytes)

    def write(self, batch: DecodeBatch) -> None:
        """Write the plan for `batch`, on the device."""
        write_latent_plan(self._arrays, batch.prefix_len, batch.suffix_len, batch.page_table.shape[1])

    def attend(self, q: Tensor, kv: LatentKV, batch: DecodeBatch) -> Tensor:
        """Return attention [B * R, heads, latent] of q [B * R, heads, latent + rotated], with the written plan."""
        causal, ints = self._arrays.grid.causal, self._arrays.ints.view(torch.uint8)
        out = torch.empty((*q.shape[:2], kv.latent), dtype=q.dtype, device=q.device)
        lse = None if causal else torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        plan = self._workspace, ints, self._info
        _call(self._module, plan, q, kv, batch.page_table.reshape(-1), out, lse, causal, self._scale)
        if lse is not None:
            add_suffix(out, lse, q, kv, batch, self._scale)
        return out


@dataclass
class PreparedLatentRound(Prepared):
    """A pass. plans: the plan, built by its first layer."""

    rounds: LatentRounds
    batch: DecodeBatch
    plans: dict[tuple[Any, ...], LatentRoundPlan] = field(default_factory=dict)

    def plan(self, q: Tensor, kv: LatentKV, rule: ScoreRule) -> bool:
        self._planned(q, kv, rule.scale)
        return True

    def forward(self, q: Tensor, kv: LatentKV, rule: ScoreRule, sinks: Tensor | None = None) -> Tensor:
        return self._planned(q, kv, rule.scale).attend(q, kv, self.batch)

    def _planned(self, q: Tensor, kv: LatentKV, scale: float) -> LatentRoundPlan:
        """Return the written plan for queries and rows of this shape; layers of one shape share it."""
        shape = (q.shape, kv.latent, scale)
        if shape not in self.plans:
            plan = self.rounds.plan(self.batch, q, kv, scale)
            plan.write(self.batch)
            self.plans[shape] = plan
        return self.plans[shape]


def _module(dtype: torch.dtype, kv: LatentKV) -> Module:
    """Return FlashInfer's MLA kernels for this dtype and these latent sizes; compiled or loaded once by the library."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper  # noqa: F401  says what is missing
    from flashinfer.mla._core import get_batch_mla_module

    return get_batch_mla_module("fa3", dtype, dtype, dtype, torch.int32, kv.latent, kv.rows.shape[2] - kv.latent, False)


def _call(
    module: Module,
    plan: tuple[Tensor, Tensor, list[int]],
    q: Tensor,
    kv: LatentKV,
    pages: Tensor,
    out: Tensor,
    lse: Tensor | None,
    causal: bool,
    scale: float,
) -> None:
    """Attend from q [rows, heads, latent + rotated] to the pages, into `out` and `lse`. plan: workspace, plan arrays
    and plan info, as the library expects them. scale: factor of scores."""
    latent, rotated = q[..., : kv.latent], q[..., kv.latent :]
    rows = kv.rows
    # in the kernel's order; the last three are the base of log-sum-exps (2) and the scales of FP8 rows
    module.run(
        *plan,
        latent,
        rotated,
        rows[..., : kv.latent],
        rows[..., kv.latent :],
        pages,
        out,
        lse,
        int(causal),
        q.shape[1],
        rows.shape[1],
        scale,
        False,
        1.0,
        1.0,
    )


def _check(module: Module, grid: LatentGrid, q: Tensor, kv: LatentKV, scale: float) -> None:
    """Raise RuntimeError if the results differ from those with FlashInfer's own plan, which shows an unsupported
    version."""
    device, dtype, page_size = q.device, q.dtype, kv.rows.shape[1]
    one = LatentGrid(1, grid.rows, grid.heads, grid.multiprocessors, grid.causal)
    pages = -(-SAMPLE_TOKENS // page_size)
    generator = torch.Generator(device).manual_seed(0)
    rows = torch.randn((pages, page_size, kv.rows.shape[2]), generator=generator, device=device).to(dtype)
    query = torch.randn((grid.rows, *q.shape[1:]), generator=generator, device=device).to(dtype)
    sample, table = LatentKV(rows, kv.latent), torch.arange(pages, dtype=torch.int32, device=device)
    added = grid.rows if grid.causal else 0
    prefix = torch.tensor([SAMPLE_TOKENS - added], dtype=torch.int32, device=device)
    row_bytes = kv.latent * q.itemsize
    ours = torch.empty((grid.rows, grid.heads, kv.latent), dtype=dtype, device=device)
    theirs = torch.empty_like(ours)

    arrays = LatentPlanArrays(one, device)
    write_latent_plan(arrays, prefix, added, pages)
    floats = torch.empty(one.max_partial_rows * (row_bytes + 4), dtype=torch.uint8, device=device)
    info = arrays.plan_info(one.max_partial_rows * row_bytes)
    _call(module, (floats, arrays.ints.view(torch.uint8), info), query, sample, table, ours, None, grid.causal, scale)

    def host(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    ints = torch.empty(8 << 20, dtype=torch.uint8, device=device)
    staged = torch.empty(ints.shape, dtype=torch.uint8, pin_memory=Capability.of(device).has_streams)
    floats = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    lists = host(0, grid.rows), host(0, pages), host(SAMPLE_TOKENS)
    info = module.plan(floats, ints, staged, *lists, grid.heads, kv.latent, grid.causal)
    _call(module, (floats, ints, list(info)), query, sample, table, theirs, None, grid.causal, scale)
    difference = (ours.float() - theirs.float()).norm() / theirs.float().norm()
    if not bool(difference < TOLERANCE):
        import flashinfer

        raise RuntimeError(
            f"attention backend 'flashinfer': flashinfer {flashinfer.__version__} reads plans over latent rows "
            f"otherwise than 0.6.17; {pip('install')} flashinfer-python==0.6.17, or choose triton"
        )
