"""Attention of prompt chunks over keys and values computed from latent rows, by our Triton kernel."""

from torch import Tensor

from aerie.attention.expansion import ExpandedChunks
from aerie.kernels.attend.expanded_prefill_triton import attend_expanded, expanded_tiles
from aerie.kernels.attend.prefill_plan_triton import plan_tiles
from aerie.kernels.kv.views import ExpandedKV
from aerie.kernels.rope.rotation import Angles


class TritonExpandedChunks(ExpandedChunks):
    """Expanded chunks for our kernel. Lists their tiles once per pass."""

    def attend(self, q: Tensor, made: ExpandedKV, angles: Angles, scale: float, out: Tensor) -> Tensor:
        tiles = expanded_tiles(q.itemsize)
        if tiles.block_m not in self.tile_lists:
            self.tile_lists[tiles.block_m] = plan_tiles(self.batch, tiles.block_m)
        if self.batch.is_padded:
            out.zero_()
        return attend_expanded(q, made, angles, self.tile_lists[tiles.block_m], tiles, scale, out)
