"""Attention sinks: one more score per query head, without a value (gpt-oss)."""

import torch
from torch import Tensor, nn

from workers.distributed.tp_group import TPGroup
from workers.layers.linear import rank_span
from workers.layers.linear_method import check_plain
from workers.layers.weighted import WeightedModule, WeightKey, check_shape


class AttentionSinks(WeightedModule):
    """The tensor `sinks` of a layer's attention, sharded by heads. In name maps it has the checkpoint name of the
    attention.

    num_heads: query heads of the model.
    sinks: [this rank's query heads] float32, as `attention.backend.Prepared.forward` takes it.
    """

    def __init__(self, num_heads: int, group: TPGroup) -> None:
        super().__init__()
        self.heads = rank_span(num_heads, group, "num_attention_heads")
        self.sinks = nn.Parameter(torch.zeros(self.heads.size, dtype=torch.float32), requires_grad=False)

    def weight_keys(self) -> tuple[WeightKey, ...]:
        return (WeightKey("sinks"),)

    def load(self, key: WeightKey, full: Tensor) -> None:
        check_plain(full)
        check_shape(full, (self.heads.total,))
        self.sinks.data.copy_(full[self.heads.first : self.heads.end])

    def fill_dummy(self, generator: torch.Generator) -> None:
        self.sinks.data.normal_(generator=generator)
