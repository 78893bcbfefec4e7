"""`LatentLayout`: one row for all heads, the same on every rank, as multi-head latent attention keeps it (DeepSeek-V2,
arXiv 2405.04434, section 2.1)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attention.kv_cache.layout import KVLayout, LayerGroup, PerToken
from attention.rotation import rotate_pairs
from attention.views import LatentKV


@dataclass(frozen=True)
class LatentLayout(KVLayout[LatentKV]):
    """latent: dimensions of the compressed keys and values, which carry no position. rotated: of the part beside them
    that does. dtype: of both."""

    latent: int
    rotated: int
    dtype: torch.dtype

    kind: ClassVar[str] = "latent rows"

    @property
    def per_token(self) -> tuple[PerToken, ...]:
        return (PerToken((self.latent + self.rotated,), self.dtype),)

    def view(self, tensors: tuple[Tensor, ...]) -> LatentKV:
        return LatentKV(tensors[0], self.latent)

    def store(
        self,
        view: LatentKV,
        q: Tensor,
        rows: tuple[Tensor, ...],
        cos: Tensor,
        sin: Tensor,
        index: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        """rows: [rows, latent + rotated], not yet turned. q: [rows, q_heads, latent + rotated]; stays as it is.

        On GPUs `workers.ops.latent.normed_latents_triton` does this, together with what stands around it in a layer."""
        (row,), cos, sin = rows, cos[index], sin[index]
        turned = self._turned(row.unsqueeze(1), cos, sin).squeeze(1)
        view.rows.view(-1, turned.shape[1]).index_copy_(0, slot_mapping, turned)
        return self._turned(q, cos, sin)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [rows, heads, latent + rotated] with its last part turned."""
        return torch.cat((x[..., : self.latent], rotate_pairs(x[..., self.latent :], cos, sin)), dim=-1)


def keeps_latent_rows(groups: Iterable[LayerGroup]) -> bool:
    """Whether layers of a model do, instead of keys and values by heads."""
    return any(isinstance(group.layout, LatentLayout) for group in groups)
