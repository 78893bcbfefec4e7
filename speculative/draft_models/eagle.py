"""EAGLE and EAGLE-3 heads: one decoder layer that reads the target's features and the next token's embedding.

Row i pairs the feature of position i with the embedding of token i + 1, sits at position i, and predicts token i + 2.
A head returns its recurrent hidden state, which takes the feature's place in the next draft step.
"""

from abc import abstractmethod

import torch
from torch import Tensor, nn

from speculative.draft_models.config import DraftConfig
from workers.distributed.tp_group import TPGroup
from workers.layers.forward_context import ForwardContext
from workers.layers.linear import ReplicatedLinear
from workers.layers.norm import RMSNorm
from workers.layers.rotary import Angles, RotaryTable
from workers.layers.vocab import LMHead, VocabEmbedding
from workers.models.decoder import DecoderOutput
from workers.models.llama import make_attention, make_mlp


class DraftHead(nn.Module):
    """What drafting needs of a head. group: the ranks that share it. embed_tokens: over the target's vocabulary.
    lm_head: over the draft's. target_ids: [draft vocab] int64, the target's id of each draft id; None if equal.
    reads_last_layer: whether its features are the target's final hidden states."""

    reads_last_layer = False
    embed_tokens: VocabEmbedding
    lm_head: LMHead
    target_ids: Tensor | None

    def __init__(self, config: DraftConfig, group: TPGroup, max_position: int, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.group = group
        self.rotary = RotaryTable(config.model.rope, config.model.head_dim, max_position, device)
        self.embed_tokens = VocabEmbedding(config.model.vocab_size, config.model.hidden_size, group)
        self.lm_head = LMHead(config.vocab_size, config.model.hidden_size, group)
        self.target_ids = None

    @abstractmethod
    def features(self, output: DecoderOutput) -> Tensor:
        """[rows, F]: what of the target's output this head reads."""

    @abstractmethod
    def combine(self, features: Tensor) -> Tensor:
        """[rows, hidden] from features [rows, F]."""

    @abstractmethod
    def forward(self, ids: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Recurrent hidden state [n, hidden] of the rows that attend, from next tokens ids [rows] int64 and hidden
        [rows, hidden]."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, shard size] over the draft's vocabulary."""

    def to_target(self, ids: Tensor) -> Tensor:
        """The target's token ids of draft ids, any shape."""
        return ids if self.target_ids is None else self.target_ids[ids]


class HeadLayer(nn.Module):
    """A Llama block without a norm before its attention, as EAGLE's heads have it. input_size: what attention reads."""

    def __init__(self, config: DraftConfig, group: TPGroup, input_size: int) -> None:
        super().__init__()
        model = config.model
        self.group = group
        self.self_attn = make_attention(model, 0, group, input_size)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.rms_eps)
        self.mlp = make_mlp(model, group)

    def forward(self, x: Tensor, residual: Tensor, angles: Angles, context: ForwardContext) -> Tensor:
        """[n, hidden] of the rows that attend: residual, what attention makes of x [rows, input_size], and what the MLP
        makes of both. On a GPU `residual` is changed in place."""
        attended = self.self_attn.partial(x, angles, context)
        residual = context.attending_rows(residual)
        normed, residual = self.post_attention_layernorm.add(attended, residual, self.group)
        out: Tensor = residual + self.mlp(normed)
        return out


class Eagle3Layer(HeadLayer):
    """Its attention reads the normalised embedding beside the normalised feature."""

    def __init__(self, config: DraftConfig, group: TPGroup) -> None:
        model = config.model
        super().__init__(config, group, 2 * model.hidden_size)
        self.input_layernorm = RMSNorm(model.hidden_size, model.rms_eps)
        self.hidden_norm = RMSNorm(model.hidden_size, model.rms_eps)

    def input(self, ids: Tensor, hidden: Tensor, embedding: VocabEmbedding) -> Tensor:
        """[rows, 2 * hidden_size]: the norms of the embeddings of ids [rows] int64 and of hidden, side by side."""
        if hidden.is_cuda and embedding.shard.group.size == 1:
            from speculative.kernels.head_input import head_input

            norms = self.input_layernorm, self.hidden_norm
            return head_input(ids, embedding.weight, hidden, norms[0].weight, norms[1].weight, norms[0].eps)
        return torch.cat((self.input_layernorm(embedding(ids)), self.hidden_norm(hidden)), dim=-1)


class Eagle3Head(DraftHead):
    """EAGLE-3 (arXiv 2503.01840): three captured layers, own vocabulary, recurrent state before the final norm."""

    def __init__(self, config: DraftConfig, group: TPGroup, max_position: int, device: torch.device) -> None:
        super().__init__(config, group, max_position, device)
        model = config.model
        self.fc = ReplicatedLinear(len(config.capture) * model.hidden_size, model.hidden_size, config.fc_bias)
        self.midlayer = Eagle3Layer(config, group)
        self.norm = RMSNorm(model.hidden_size, model.rms_eps)

    def features(self, output: DecoderOutput) -> Tensor:
        assert output.captured is not None
        return output.captured

    def combine(self, features: Tensor) -> Tensor:
        combined: Tensor = self.fc(features)
        return combined

    def forward(self, ids: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        both = self.midlayer.input(ids, hidden, self.embed_tokens)
        out: Tensor = self.midlayer(both, hidden, self.rotary.at(context.positions), context)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


class EagleHead(DraftHead):
    """EAGLE and EAGLE-2 (arXiv 2401.15077, 2406.16858): the final hidden state and the embedding through one
    projection; embedding and vocabulary head are the target's."""

    reads_last_layer = True

    def __init__(self, config: DraftConfig, group: TPGroup, max_position: int, device: torch.device) -> None:
        super().__init__(config, group, max_position, device)
        model = config.model
        self.fc = ReplicatedLinear(2 * model.hidden_size, model.hidden_size, config.fc_bias)
        self.layers = nn.ModuleList([HeadLayer(config, group, model.hidden_size)])

    def features(self, output: DecoderOutput) -> Tensor:
        return output.hidden

    def combine(self, features: Tensor) -> Tensor:
        return features

    def forward(self, ids: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        x = self.fc(torch.cat((self.embed_tokens(ids), hidden), dim=-1))
        out: Tensor = self.layers[0](x, x, self.rotary.at(context.positions), context)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits


HEADS: dict[str, type[DraftHead]] = {"eagle": EagleHead, "eagle3": Eagle3Head}
