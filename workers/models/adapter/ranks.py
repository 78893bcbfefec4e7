"""Dry-runs one rank's share of a model on the meta device, to find errors of transformers' tensor-parallel plan, such
as norms over sharded heads."""

from typing import Any

import torch
from torch import Tensor

from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.linear import LinearBase, kv_head_span, rank_span
from aerie.workers.models.adapter.config import AdapterConfig
from aerie.workers.models.adapter.model import TransformersModel
from aerie.workers.models.adapter.routers import RouterChosenExperts
from aerie.workers.models.adapter.survey import NUM_ROWS, AttentionCall, decoder, keep_angles, reason_of


class _Shapes(TPGroup):
    """A group with only this rank: results have the right shape, but no values."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.new_empty(self.size, *x.shape)

    def all_gather_last(self, x: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:-1], self.size * x.shape[-1])


class _Attention:
    """Replaces `PagedAttention` in a dry run. Raises ValueError for heads that are neither this rank's nor all."""

    def __init__(self, call: AttentionCall, group: TPGroup) -> None:
        self._call = call
        first, end = kv_head_span(call.num_kv_heads, group)
        self._q = {rank_span(call.num_heads, group, "num_attention_heads").size, call.num_heads}
        self._kv = {end - first, call.num_kv_heads}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
        sizes = (q.shape[3], k.shape[3], v.shape[3])
        wanted = (self._call.head_dim, self._call.head_dim, self._call.value_dim)
        if q.shape[1] not in self._q or not {k.shape[1], v.shape[1]} <= self._kv or sizes != wanted:
            raise ValueError(f"attention gets heads of shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}")
        return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])


class _Product:
    """Replaces a linear layer's product in a dry run. Raises ValueError for inputs that are not this rank's."""

    def __init__(self, path: str, layer: LinearBase) -> None:
        self._path, self._shape = path, layer.shape

    def __call__(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if x.shape[-1] != self._shape.in_features:
            raise ValueError(f"{self._path} gets {x.shape[-1]} inputs instead of {self._shape.in_features}")
        return x.new_empty(*x.shape[:-1], self._shape.out_features)

    def gated(self, x: Tensor) -> Tensor:
        """Replaces the product before a gate."""
        return self(x)[..., : self._shape.out_features // 2]


def check_ranks(config: AdapterConfig, tensor_parallel: int, source: str) -> None:
    """Raise ValueError, naming `source`, if one of `tensor_parallel` ranks cannot run its share of the model."""
    group, device = _Shapes(0, tensor_parallel), torch.device("meta")
    ids = torch.zeros(1, NUM_ROWS, dtype=torch.int64, device=device)
    try:
        with device, torch.no_grad():
            model = TransformersModel(config, group, NUM_ROWS, device)
            for call in config.calls:
                model.theirs.get_submodule(call.module).paged = _Attention(call, group)
            for path, module in model.named_modules():
                keep_angles(module)
                if isinstance(module, LinearBase):
                    product = _Product(path, module)
                    module.method.multiply = product  # type: ignore[method-assign, assignment]
                    module.method.multiply_gated = product.gated  # type: ignore[method-assign, assignment]
                if isinstance(module, RouterChosenExperts):
                    module.forward = lambda x, *routing: x  # type: ignore[method-assign]
            hidden = decoder(model.theirs)(input_ids=ids, position_ids=ids, use_cache=False)[0]
            model.lm_head(hidden.squeeze(0))
    except Exception as error:  # a model's own code may raise anything
        if str(error).startswith("tensor_parallel="):
            raise
        raise ValueError(
            f"tensor_parallel={tensor_parallel}: transformers' plan of how ranks share {source} does not fit it "
            f"({reason_of(error)}); use tensor_parallel: 1"
        ) from error
