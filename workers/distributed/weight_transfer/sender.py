"""The trainer's end of a transfer of weights. Used by trainers, tests and benchmarks.

sender = WeightSender("127.0.0.1", 29600, world_size=1 + num_ranks)  # beside /init_weight_transfer_engine
info = announcement(tensors)                                         # the `update_info` of /update_weights
sender.send(tensors)                                                 # beside that call
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aerie.kernels.capability import Capability
from aerie.workers.distributed.weight_transfer.group import Rendezvous
from aerie.workers.distributed.weight_transfer.join import join
from aerie.workers.distributed.weight_transfer.wire import BUFFER_BYTES, Announced, as_bytes, broadcasts

_CPU = torch.device("cpu")


class WeightSender:
    """Rank 0 of a group.

    world_size: the number of all engines' ranks (`/get_world_size`), plus one.
    device: device of the tensors; a GPU sends by NCCL.
    timeout_s: limit for all ranks to join, and for each broadcast.
    Blocks until all ranks have joined. Raises TransferError.
    """

    def __init__(
        self,
        address: str,
        port: int,
        world_size: int,
        device: torch.device = _CPU,
        packed: bool = True,
        buffer_bytes: int = BUFFER_BYTES,
        timeout_s: float = 60.0,
    ) -> None:
        self._device, self._packed, self._buffer_bytes = device, packed, buffer_bytes
        where = Rendezvous(address, port, 0, world_size, timeout_s)
        self._group = join(where, device, Capability.of(device).collectives)

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Send whole tensors in their order, as `announcement` names them. Raises TransferError."""
        headers = [Announced(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        for chunk in broadcasts(headers, self._packed, self._buffer_bytes):
            parts = [as_bytes(tensors[entry.name].detach().to(self._device).contiguous()) for entry in chunk]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            if len(whole):
                self._group.broadcast(whole)

    def close(self) -> None:
        """Leave the group."""
        self._group.close()


def announcement(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the `update_info` of tensors for /update_weights."""
    shapes: list[Sequence[int]] = [tuple(tensor.shape) for tensor in tensors.values()]
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()]
    return {"names": list(tensors), "dtype_names": dtypes, "shapes": shapes}
