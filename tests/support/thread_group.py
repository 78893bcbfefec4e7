"""Tensor-parallel ranks as threads of this process: what they gather is exchanged at a barrier."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch
from torch import Tensor

from aerie.workers.distributed.tp_group import TPGroup, side_by_side

T = TypeVar("T")


class _Exchange:
    """What each rank gives, and a barrier before and after it is read; a rank that raises breaks it for all."""

    def __init__(self, size: int) -> None:
        self.given: list[Tensor] = [torch.empty(0)] * size
        self.barrier = Barrier(size, timeout=60)


@dataclass(frozen=True)
class ThreadGroup(TPGroup):
    """A `TPGroup` of threads."""

    exchange: _Exchange = field(default_factory=lambda: _Exchange(1))

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        return self.all_gather(x).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        self.exchange.given[self.rank] = x
        self.exchange.barrier.wait()
        everyone = torch.stack(self.exchange.given)
        self.exchange.barrier.wait()
        return everyone

    def all_gather_last(self, x: Tensor) -> Tensor:
        return side_by_side(self.all_gather(x))


def on_ranks(size: int, function: Callable[[TPGroup], T]) -> list[T]:
    """Return what function(group) returns on each of `size` ranks."""
    exchange = _Exchange(size)

    def run(rank: int) -> T:
        try:
            return function(ThreadGroup(rank, size, exchange=exchange))
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
