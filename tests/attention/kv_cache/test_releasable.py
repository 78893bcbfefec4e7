"""Memory that is given back and taken again at its addresses."""

import resource
from pathlib import Path

import pytest
import torch

from aerie.attention.kv_cache.layout import HeadsLayout, LayerGroup
from aerie.attention.kv_cache.pool import KVPool
from aerie.attention.kv_cache.releasable import CudaMemory, releasable

CPU = torch.device("cpu")
SIZE = (32 << 20) + 5


def resident_bytes() -> int:
    """Return the bytes of physical memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_the_system_gets_the_memory_and_gives_zeros_at_the_same_address() -> None:
    memory = releasable(SIZE, CPU)
    address = memory.tensor.data_ptr()
    for _ in range(2):
        assert not memory.tensor.any()
        memory.tensor.fill_(7)
        held = resident_bytes()
        memory.release()
        memory.release()
        assert held - resident_bytes() > 0.9 * SIZE
        memory.restore()
        assert memory.tensor.data_ptr() == address and memory.tensor.numel() == SIZE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_keeps_its_addresses(dtype: torch.dtype) -> None:
    pool = KVPool([LayerGroup((0, 2), HeadsLayout(2, 8, dtype))], 50, 4, CPU)
    addresses = [tensor.data_ptr() for tensors in pool.tensors for tensor in tensors]
    for tensor in pool.tensors[0]:
        tensor.fill_(3)
    assert pool.release() == 2 * 2 * 51 * 4 * 2 * 8 * dtype.itemsize
    pool.restore()
    assert not any(bool(tensor.any()) for tensor in pool.tensors[0])
    assert addresses == [tensor.data_ptr() for tensors in pool.tensors for tensor in tensors]


@pytest.mark.gpu
def test_graphs_replay_after_other_memory_has_come_and_gone() -> None:
    """While the memory is released, the device's free memory grows by it, and another tensor takes its place."""
    device = torch.device("cuda")
    memory = CudaMemory(SIZE, device)
    numbers = memory.tensor[: 32 << 20].view(torch.float32)
    added = torch.ones(1, device=device)
    numbers.add_(added)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers.add_(added)
    assert float(numbers.sum()) == numbers.numel()
    for _ in range(3):
        free = torch.cuda.mem_get_info(device)[0]
        memory.release()
        assert torch.cuda.mem_get_info(device)[0] - free >= 32 << 20
        other = torch.full((48 << 20,), 9, dtype=torch.uint8, device=device)
        assert int(other[-1]) == 9
        del other
        memory.restore()
        assert not bool(numbers.any())
        graph.replay()
        assert float(numbers.sum()) == numbers.numel()
    free = torch.cuda.mem_get_info(device)[0]
    del graph, numbers, memory
    assert torch.cuda.mem_get_info(device)[0] > free


@pytest.mark.gpu
def test_memory_that_is_not_free_is_named_and_can_be_taken_later() -> None:
    device = torch.device("cuda")
    memory = CudaMemory(4 << 30, device)
    memory.release()
    held = torch.empty(torch.cuda.mem_get_info(device)[0] - (2 << 30), dtype=torch.uint8, device=device)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        memory.restore()
    del held
    memory.restore()
    assert int(memory.tensor.sum()) == 0
