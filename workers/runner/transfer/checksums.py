"""Checksums of a rank's weights: the handler of `SumWeights`. Steps wait for it: at 8B's size it reads 16 GB."""

from collections.abc import Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from aerie.workers.distributed.weight_transfer.wire import as_bytes
from aerie.workers.layers.linear_method import DenseLinearMethod
from aerie.workers.layers.vocab import VocabEmbedding
from aerie.workers.runner.weight_update import RunningModel
from aerie.workers.scheduling.commands.command import SumWeights, WeightSums

_PERIOD = 65521  # after which the factors by position repeat: a prime, so that swapped rows differ
_STEP = 1 << 24  # bytes summed at once, as int64: eight times as much scratch


class WeightChecker:
    """Sums the weights of all models of a rank.

    models: by name, "target" first.
    """

    def __init__(self, models: Mapping[str, RunningModel]) -> None:
        self._models = models

    def __call__(self, work: SumWeights) -> WeightSums:
        """Return the checksums by model and name of the tensor in it. A draft's modules that are the target's are left
        out."""
        seen, sums = set[int](), dict[str, str]()
        for title, running in self._models.items():
            for name, tensor in tensors_of(running.model):
                if tensor.data_ptr() not in seen or not tensor.numel():
                    seen.add(tensor.data_ptr())
                    sums[f"{title}.{name}"] = checksum(tensor)
        return WeightSums(sums)


def tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return all weights and buffers of a model by name, those that a CPU's kernels have in their own layout as they
    were loaded."""
    tensors = dict(chain(model.named_parameters(), model.named_buffers()))
    for path, module in model.named_modules():
        if isinstance(module, DenseLinearMethod):
            tensors[f"{path}.weight"] = module.dense_weight()
        elif isinstance(module, VocabEmbedding):
            tensors[f"{path}.weight"] = module.dense_weight
    return list(tensors.items())


def checksum(tensor: Tensor) -> str:
    """Return 16 hexadecimal digits: the sum of the bytes, and their sum weighted by position, each modulo 2**32."""
    whole = as_bytes(tensor.detach().contiguous())
    plain = weighted = torch.zeros((), dtype=torch.int64, device=whole.device)
    for start in range(0, len(whole), _STEP):
        part = whole[start : start + _STEP].to(torch.int64)
        factor = torch.arange(start, start + len(part), device=part.device) % _PERIOD + 1
        plain, weighted = plain + part.sum(), (weighted + (part * factor).sum()) % (1 << 32)
    return f"{int(plain) % (1 << 32):08x}{int(weighted):08x}"
