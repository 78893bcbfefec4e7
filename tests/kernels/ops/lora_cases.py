"""`aerie.kernels.lora.product`: one and several parts, padding outputs, rows without an adapter, one row, many rows."""

import torch

from aerie.kernels.lora.product import LoraTables, add_lora
from tests.kernels.ops.case import TYPES, Case
from tests.kernels.ops.norm_cases import rows


def lora_tables(
    places: int, rank: int, inputs: int, parts: tuple[int, ...], outputs: int, dtype: torch.dtype, device: torch.device
) -> LoraTables:
    """Return random tables; place p has rank min(rank, 8 (p + 1)), and every second place no last part."""
    down = rows(places, (len(parts) - 1) * rank, inputs, dtype=dtype, device=device, seed=1) * inputs**-0.5
    up = rows(places, outputs, rank, dtype=dtype, device=device, seed=2) * rank**-0.5
    for place in range(places):
        down[place].view(-1, rank, inputs)[:, 8 * (place + 1) :] = 0.0
        up[place, :, 8 * (place + 1) :] = 0.0
        if place % 2:
            down[place, -rank:] = 0.0
            up[place, parts[-2] : parts[-1]] = 0.0
    up[:, parts[-1] :] = 0.0
    return LoraTables(down, up, parts)


def _case(count: int, places: int, rank: int, inputs: int, parts: tuple[int, ...], dtype: torch.dtype) -> Case:
    def arguments(device: torch.device) -> tuple[object, ...]:
        outputs = parts[-1] + 8 * (count % 2)
        y, x = (rows(count, n, dtype=dtype, device=device, seed=n) for n in (outputs, inputs))
        chosen = torch.randint(-1, places, (count,), generator=torch.Generator().manual_seed(count), dtype=torch.int32)
        return y, x, lora_tables(places, rank, inputs, parts, outputs, dtype, device), chosen.to(device)

    name = f"{count}-{places}places-rank{rank}-{inputs}x{parts[-1]}-{str(dtype).removeprefix('torch.')}"
    return Case(add_lora, name, arguments, written=(0,))


CASES = tuple(
    _case(count, places, rank, inputs, parts, dtype)
    for count, places, rank, inputs, parts in (
        (1, 1, 16, 256, (0, 128)),
        (7, 3, 32, 136, (0, 96, 128, 160)),
        (40, 4, 64, 512, (0, 72, 144)),
        (133, 2, 16, 72, (0, 40)),
    )
    for dtype in TYPES
)
