"""Joins a transfer's group with the library for a device."""

import torch

from aerie.workers.distributed.weight_transfer.group import GlooGroup, Rendezvous, TransferGroup
from aerie.workers.distributed.weight_transfer.nccl_group import NCCLGroup


def join(where: Rendezvous, device: torch.device, collectives: str) -> TransferGroup:
    """Join a group. collectives: "gloo" or "nccl" (`Capability.collectives`). Raises TransferError."""
    return NCCLGroup(where, device) if collectives == "nccl" else GlooGroup(where)
