"""Modules for multi-token prediction (MTP) that are part of a target's checkpoint. A module projects the target's final
hidden state and the next token's embedding to one vector, and runs one more decoder layer on it. The same module drafts
every depth, with the target's embedding and vocabulary head. Families: `mtp_deepseek`, `mtp_qwen`."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from speculative.drafts.method import DraftMethod, DraftModel
from workers.distributed.tp_group import TPGroup
from workers.layers.decoder_layer import DecoderLayer
from workers.layers.forward_context import ForwardContext
from workers.layers.linear import ReplicatedLinear
from workers.layers.norm import RMSNorm
from workers.layers.rotary import RotaryTable
from workers.models.decoder import DecoderOutput
from workers.ops.fp8.rows import Fp8Rows


@dataclass(frozen=True)
class Mtp(DraftMethod):
    """Common parts of the families' methods.

    layer_name: the checkpoint's name of the module's layer.
    """

    name: ClassVar[str] = "mtp"
    shared_modules: ClassVar[tuple[str, ...]] = ("embed_tokens", "lm_head")
    trims_head: ClassVar[bool] = True

    @property
    @abstractmethod
    def layer_name(self) -> str: ...

    @classmethod
    def folder(cls, draft_path: str, target_path: str) -> str:
        """Return the configured draft's folder, or else the target's."""
        return draft_path or target_path


class MtpModel(DraftModel):
    """A module on one rank. The output of its last norm is its recurrent state, which later draft steps use in place of
    the target's hidden state.

    Both families read the output of the target's last norm. With its input instead, a Qwen3.5 accepted 1.80 instead of
    2.74 tokens per round (ModelTC/LightLLM#1402; also llama.cpp#24025).

    layer: attention and MLP; layer 0 of the draft's KV.
    norm: class of its norms.
    """

    reads_last_layer: ClassVar[bool] = True

    def __init__(
        self,
        method: Mtp,
        group: TPGroup,
        layer: DecoderLayer,
        rotary: RotaryTable,
        rms_eps: float,
        norm: type[RMSNorm] = RMSNorm,
    ) -> None:
        super().__init__(method, group)
        size = method.model.hidden_size
        self.rotary = rotary
        self.enorm, self.hnorm, self.norm = (norm(size, rms_eps) for _ in range(3))
        self.eh_proj = ReplicatedLinear(2 * size, size)
        self.layer = layer

    def features(self, output: DecoderOutput) -> Tensor:
        return output.hidden

    def keep(self, ids: Tensor, features: Tensor, context: ForwardContext) -> None:
        normed, _ = self._input(ids, features)
        self.layer.self_attn.keep(normed, self.rotary.at(context.positions), context)

    def step(self, ids: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        normed, residual = self._input(ids, hidden)
        added, residual = self.layer(normed, residual, self.rotary.at(context.positions), context)
        state, _ = self.norm.add(added, residual, self.group)
        return state

    def _input(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor | Fp8Rows, Tensor]:
        """Return the input of the layer's attention, and the residual stream."""
        residual = self.eh_proj(torch.cat((self.enorm(self.embed_tokens(ids)), self.hnorm(hidden)), dim=-1))
        return self.layer.input_layernorm.for_product(residual, self.layer.self_attn.fp8_inputs), residual

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits
