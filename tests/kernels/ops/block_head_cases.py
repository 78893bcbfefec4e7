"""`aerie.kernels.drafting.block_head`: one row a block, blocks shorter than the taps, odd widths, parts of a
projection."""

import torch

from aerie.kernels.drafting.block_head import convolve_blocks, gru_step, score_candidates
from tests.kernels.ops.case import TYPES, Case
from tests.kernels.ops.norm_cases import rows


def _convolution(blocks: int, length: int, channels: int, taps: int, groups: int, dtype: torch.dtype) -> Case:
    def arguments(device: torch.device) -> tuple[object, ...]:
        count = blocks * length
        x, base = (rows(n, channels, dtype=dtype, device=device) for n in (count, taps))
        dynamic = rows(count, 2 * taps * groups, dtype=dtype, device=device, seed=1)
        return x, base, dynamic.view(count, 2, taps, groups)[:, 1], length

    name = f"{blocks}-{length}-{channels}-{taps}-{groups}-{str(dtype).removeprefix('torch.')}"
    return Case(convolve_blocks, name, arguments)


def _scores(
    batch: int, width: int, depths: int, candidates: int, rank: int, dtype: torch.dtype, scaled: bool = True
) -> Case:
    def arguments(device: torch.device) -> tuple[object, ...]:
        generator = torch.Generator().manual_seed(rank)
        ids = torch.randint(0, 50, (batch, depths, candidates), generator=generator)
        previous = torch.randint(0, 50, (batch, width), generator=generator)
        unary = rows(batch * depths, candidates, dtype=torch.float32, device=device).view(ids.shape)
        projected = rows(batch * depths, rank, dtype=dtype, device=device).view(batch, depths, rank)
        before, after = (rows(50, rank, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
        return unary, ids.to(device), projected if scaled else None, depths - 1, previous.to(device), before, after

    name = f"{batch}-{width}-{depths}-{candidates}-{rank}-{scaled}-{str(dtype).removeprefix('torch.')}"
    return Case(score_candidates, name, arguments, tolerance=2e-5)


def _gru(count: int, size: int, dtype: torch.dtype) -> Case:
    def arguments(device: torch.device) -> tuple[object, ...]:
        gates = (rows(count, 3 * size, dtype=dtype, device=device, seed=seed) * 3 for seed in (1, 2))
        return *gates, rows(count, size, dtype=dtype, device=device)

    return Case(gru_step, f"{count}-{size}-{str(dtype).removeprefix('torch.')}", arguments, tolerance=None)


CASES = (
    *(_gru(count, size, dtype) for count, size in ((1, 24), (5, 1040)) for dtype in TYPES),
    *(
        _convolution(*shape, dtype)
        for shape in ((1, 8, 4096, 2, 256), (3, 7, 1040, 3, 65), (5, 1, 64, 2, 4), (2, 2, 96, 4, 6))
        for dtype in TYPES
    ),
    *(
        _scores(*shape, dtype)
        for shape in ((1, 1, 7, 16, 256), (3, 4, 15, 16, 64), (2, 3, 1, 5, 24))
        for dtype in TYPES
    ),
    *(_scores(2, 3, 4, 64, 40, dtype, scaled=False) for dtype in TYPES),
)
