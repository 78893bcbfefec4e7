"""The experts that routers choose for each token (`cache.routed_experts`): stored in pages beside the KV, and read when
a request has ended. Used by `aerie.workers.runner.build`."""

import functools
import io

import numpy as np
import torch

from aerie.attention.kv_cache.pool import KVPool
from aerie.workers.layers.routing import Router
from aerie.workers.models.decoder import Decoder, TargetModel
from aerie.workers.runner.commands import CommandHandlers
from aerie.workers.scheduling.commands.command import ReadRoutedExperts, RoutedExperts


class ExpertRecord:
    """The record of one rank's target.

    model: a `Decoder`; its routers write to the last group of `pool` from now on.
    rank: only rank 0 reads, because all ranks choose the same experts.
    """

    def __init__(self, model: TargetModel, pool: KVPool, rank: int) -> None:
        assert isinstance(model, Decoder), "other models have no `recorded_routing`"
        self._pool, self._rank = pool, rank
        for layer, block in enumerate(model.layers):
            for module in block.modules():
                if isinstance(module, Router):
                    module.recorded = functools.partial(pool.layer, len(model.layers) + layer)

    def register(self, handlers: CommandHandlers) -> None:
        handlers.add(ReadRoutedExperts, self.read)

    def read(self, work: ReadRoutedExperts) -> RoutedExperts:
        """Return the experts of requests that have ended. Waits for the device."""
        if self._rank != 0:
            return RoutedExperts()
        (stored,) = self._pool.tensors[-1]  # [layers, pages + 1, page_size, experts of a token]
        found = []
        for pages, num_tokens in zip(work.pages, work.num_tokens, strict=True):
            chosen = stored[:, torch.tensor(pages, device=stored.device)].flatten(1, 2)[:, :num_tokens]
            ids = chosen.transpose(0, 1).contiguous().cpu().numpy()
            file = io.BytesIO()
            np.save(file, ids if ids.dtype == np.uint8 else ids.view(np.uint16))
            found.append(file.getvalue())
        return RoutedExperts(tuple(found))
