"""The DSpark and DFlash2 heads over whole sequences: a row's scores depend on the token before.

`speculative.drafts.blocks.dspark` and `dflash2` serve the same files. Parameter names are those of the published heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from speculative.drafts.blocks.dflash2 import DFlash2
from speculative.drafts.blocks.dspark import DSpark
from speculative.training.blocks.head import BlockContext, BlockHead
from speculative.training.blocks.loss import BlockScores, Objective
from speculative.training.layers import linear

_CODE_STD = 0.1  # of the codes of the token before; those of the next token start at zero, so all biases do


class MarkovHead(nn.Module):
    """A low-rank bias that depends on the token before."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = linear(rank, vocab_size)


class ConfidenceHead(nn.Module):
    """A row's probability of being accepted, as a logit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


class DSparkHead(BlockHead):
    """DFlash with a Markov head and a confidence head, which reads the row's state and the code of the token before."""

    def __init__(self, method: DSpark, objective: Objective) -> None:
        super().__init__(method, objective)
        self.markov_head = MarkovHead(method.model.vocab_size, method.rank)
        self.confidence_head = ConfidenceHead(method.model.hidden_size + method.rank)

    def initialise(self) -> None:
        nn.init.normal_(self.markov_head.markov_w1.weight, std=_CODE_STD)
        nn.init.zeros_(self.markov_head.markov_w2.weight)
        nn.init.zeros_(self.confidence_head.proj.bias)

    def score(self, states: Tensor, previous: Tensor) -> BlockScores:
        embedded = self.markov_head.markov_w1(previous)
        logits = self.logits(states) + self.markov_head.markov_w2(embedded)
        confidence = self.confidence_head.proj(torch.cat((states, embedded.to(states.dtype)), dim=-1)).squeeze(-1)
        return BlockScores(logits, None, confidence)


class BlockConvolution(nn.Module):
    """The convolutions before and after a sublayer, over the rows of a block; tap 0 is the row itself."""

    def __init__(self, hidden_size: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.taps, self.group_size = taps, group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden_size))
        self.kernel_projection = linear(hidden_size, 2 * taps * hidden_size // group_size)
        nn.init.ones_(self.base_kernel[:, 0])

    def kernels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return both kernels [.., taps, H] of x [.., H]."""
        dynamic = self.kernel_projection(x).view(*x.shape[:-1], 2, self.taps, -1, 1)
        channels = dynamic.expand(*dynamic.shape[:-1], self.group_size).flatten(-2)
        before, after = (self.base_kernel.to(x.dtype) + channels).unbind(-3)
        return before, after

    def convolve(self, x: Tensor, kernel: Tensor, blocks: int) -> Tensor:
        """Convolve the rows of each block, x [B, blocks * R, H], with kernel [B, blocks * R, taps, H]."""
        by_block = x.view(x.shape[0], blocks, -1, x.shape[2])
        out = x * kernel[:, :, 0]
        for tap in range(1, self.taps):
            shifted = functional.pad(by_block, (0, 0, tap, 0))[:, :, : by_block.shape[2]]
            out = out + shifted.reshape(x.shape) * kernel[:, :, tap]
        return out


class ConvolvedLayer(Qwen3DecoderLayer):  # type: ignore[misc]
    """Qwen3's layer with convolutions around attention and MLP, over the rows of each block."""

    def __init__(self, config: PreTrainedConfig, method: DFlash2) -> None:
        super().__init__(config, 0)
        sizes = method.model.hidden_size, method.taps, method.group_size
        self.attention_conv, self.mlp_conv = BlockConvolution(*sizes), BlockConvolution(*sizes)

    def forward(self, x: Tensor, *, context: BlockContext, **others: Any) -> Tensor:
        blocks = context.visible.shape[1]
        normed = self.input_layernorm(x)
        before, after = self.attention_conv.kernels(normed)
        attended, _ = self.self_attn(
            self.attention_conv.convolve(normed, before, blocks), attention_mask=None, context=context, **others
        )
        x = x + self.attention_conv.convolve(attended, after, blocks)
        normed = self.post_attention_layernorm(x)
        before, after = self.mlp_conv.kernels(normed)
        return x + self.mlp_conv.convolve(self.mlp(self.mlp_conv.convolve(normed, before, blocks)), after, blocks)


class CandidateSelector(nn.Module):
    """Scores a row's tokens given the token before: <predecessor[previous] * projection(state), successor[token]>."""

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.predecessor_codebook, self.successor_codebook = (
            nn.Parameter(torch.zeros(vocab_size, rank)) for _ in range(2)
        )
        self.hidden_projection = linear(hidden_size, rank)

    def forward(self, states: Tensor, previous: Tensor) -> Tensor:
        """Return scores [.., vocabulary] of states [.., H] and previous [..] int64."""
        code = functional.embedding(previous, self.predecessor_codebook) * self.hidden_projection(states)
        return functional.linear(code, self.successor_codebook)


class DFlash2Head(BlockHead):
    """DFlash with convolutions and a selector. In training the selector scores all tokens, not only a row's best."""

    def __init__(self, method: DFlash2, objective: Objective) -> None:
        super().__init__(method, objective)
        self.candidates = method.candidates
        self.candidate_selector = CandidateSelector(method.model.vocab_size, method.rank, method.model.hidden_size)

    def make_layer(self, config: PreTrainedConfig) -> nn.Module:
        assert isinstance(self.method, DFlash2)
        return ConvolvedLayer(config, self.method)

    def initialise(self) -> None:
        nn.init.normal_(self.candidate_selector.predecessor_codebook, std=_CODE_STD)
        for module in self.modules():
            if isinstance(module, BlockConvolution):
                nn.init.zeros_(module.kernel_projection.weight)

    def score(self, states: Tensor, previous: Tensor) -> BlockScores:
        unary = self.logits(states)
        return BlockScores(unary + self.candidate_selector(states, previous), unary)

    def best(self, scores: BlockScores) -> Tensor:
        assert scores.unary is not None
        candidates = scores.unary.topk(self.candidates, dim=-1).indices
        return candidates.gather(-1, scores.logits.gather(-1, candidates).argmax(-1, keepdim=True)).squeeze(-1)
