"""`aerie.kernels.lora.product`: one and several parts, padding outputs, rows without an adapter, one row, many rows.
`aerie.kernels.lora.embedding`: also ids of another shard.
`aerie.kernels.experts.adapted.product`: both products, also experts of other ranks, and shared ones."""

import torch
from torch import Tensor

from aerie.kernels.experts.adapted.product import ExpertLoraTables, add_expert_lora, blocks_by_expert
from aerie.kernels.lora.embedding import add_lora_embedding
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


def _embedding_case(count: int, places: int, rank: int, size: int, hidden: int, dtype: torch.dtype) -> Case:
    def arguments(device: torch.device) -> tuple[object, ...]:
        generator = torch.Generator().manual_seed(count)
        y = rows(count, hidden, dtype=dtype, device=device, seed=hidden)
        ids = torch.randint(0, size, (count,), generator=generator)
        ids[1::5], ids[2::7] = -1, size
        chosen = torch.randint(-1, places, (count,), generator=generator, dtype=torch.int32)
        tables = lora_tables(places, rank, size, (0, hidden), hidden, dtype, device)
        return y, ids.to(device), tables, chosen.to(device)

    name = f"{count}-{places}places-rank{rank}-{size}x{hidden}-{str(dtype).removeprefix('torch.')}"
    return Case(add_lora_embedding, name, arguments, written=(0,))


LORA_CASES = tuple(
    _case(count, places, rank, inputs, parts, dtype)
    for count, places, rank, inputs, parts in (
        (1, 1, 16, 256, (0, 128)),
        (7, 3, 32, 136, (0, 96, 128, 160)),
        (40, 4, 64, 512, (0, 72, 144)),
        (133, 2, 16, 72, (0, 40)),
    )
    for dtype in TYPES
)
EMBEDDING_CASES = tuple(
    _embedding_case(*sizes, dtype)
    for sizes in ((1, 1, 16, 96, 128), (9, 3, 48, 51, 72), (70, 4, 64, 130, 200), (133, 5, 32, 7, 40))
    for dtype in TYPES
)


def expert_tables(
    adapters: int,
    experts: int,
    rank: int,
    inputs: int,
    parts: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> ExpertLoraTables:
    """Return random tables; adapter a has rank min(rank, 8 (a + 1)), and no last expert."""
    count = len(parts) - 1
    down = rows(adapters * experts, count * rank, inputs, dtype=dtype, device=device, seed=1) * inputs**-0.5
    up = rows(adapters * experts, parts[-1], rank, dtype=dtype, device=device, seed=2) * rank**-0.5
    down, up = (each.view(adapters, experts, *each.shape[1:]) for each in (down, up))
    for adapter in range(adapters):
        down[adapter].view(experts * count, rank, inputs)[:, 8 * (adapter + 1) :] = 0.0
        up[adapter, ..., 8 * (adapter + 1) :] = 0.0
        up[adapter, -1] = 0.0
    return ExpertLoraTables(down.contiguous(), up.contiguous(), parts)


def chosen_experts(count: int, slots: int, experts: int) -> Tensor:
    """Return [count, slots] experts, some of other ranks (-1), and one shared expert of every row at the end."""
    generator = torch.Generator().manual_seed(count)
    chosen = torch.stack([torch.randperm(experts + 1, generator=generator)[: slots - 1] - 1 for _ in range(count)])
    return torch.cat((chosen, torch.full((count, 1), experts)), 1).int()


def _expert_case(
    second: bool, count: int, block: int, adapters: int, rank: int, inputs: int, outputs: int, dtype: torch.dtype
) -> Case:
    experts, slots = 5, 3
    parts = (0, outputs) if second else (0, outputs // 2, outputs)

    def arguments(device: torch.device) -> tuple[object, ...]:
        blocks = blocks_by_expert(chosen_experts(count, slots, experts).to(device), experts + 1, block)
        cells = blocks.pairs.shape[0]
        generator = torch.Generator().manual_seed(count)
        index = torch.randint(-1, adapters, (count,), generator=generator, dtype=torch.int32).to(device)
        y = rows(count * slots if second else cells, outputs, dtype=dtype, device=device, seed=3)
        x = rows(cells if second else count, inputs, dtype=dtype, device=device, seed=4)
        weight = rows(count, slots, dtype=torch.float32, device=device, seed=5) if second else None
        return y, x, expert_tables(adapters, experts, rank, inputs, parts, dtype, device), blocks, index, weight

    name = f"{'down' if second else 'gates'}-{count}-of{block}-rank{rank}-{inputs}x{outputs}-{str(dtype)[6:]}"
    return Case(add_expert_lora, name, arguments, written=(0,))


EXPERT_CASES = tuple(
    _expert_case(*sizes, dtype)
    for sizes in (
        (False, 1, 16, 1, 16, 256, 128),
        (True, 1, 16, 2, 16, 72, 136),
        (False, 9, 16, 3, 32, 136, 144),
        (True, 9, 16, 2, 64, 48, 264),
        (False, 70, 32, 2, 16, 264, 80),
        (True, 70, 64, 3, 32, 128, 72),
    )
    for dtype in TYPES
)
CASES = LORA_CASES + EMBEDDING_CASES + EXPERT_CASES
