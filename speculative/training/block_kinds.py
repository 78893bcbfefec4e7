"""The published kinds of block heads and their files: DFlash, DFlash2 and Domino in z-lab's folder layout, DSpark in
DeepSpec's.

DSpark's and DFlash2's scores of a row depend on the previous token, Domino's on all tokens of the block before it.
`aerie.speculative.drafts.blocks` serves the same files. Parameter names are those of the published heads.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from aerie.speculative.drafts.blocks.dflash import DFlash
from aerie.speculative.drafts.blocks.dflash2 import DFlash2
from aerie.speculative.drafts.blocks.domino import Domino
from aerie.speculative.drafts.blocks.dspark import DSpark
from aerie.speculative.training import TrainingError
from aerie.speculative.training.blocks import BlockContext, BlockHead, captured_layers
from aerie.speculative.training.draft import (
    DraftKind,
    DraftVocabulary,
    TrainedDraft,
    Unrolling,
    head_config,
    read_head,
    write_checkpoint,
)
from aerie.speculative.training.eagle3 import MODEL_TYPES
from aerie.speculative.training.layers import linear
from aerie.speculative.training.losses import BlockScores, Objective
from aerie.speculative.training.samples import Sample

_MODEL_TYPES = (*MODEL_TYPES, "qwen3_5_text")  # model_type of supported targets
_MAX_STATE = 1024  # size of a path's state, as in published heads
# initial standard deviation of the previous token's codes; the next token's codes and all biases start at 0
_CODE_STD = 0.1


class MarkovHead(nn.Module):
    """A low-rank bias that depends on the previous token."""

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
    """DFlash with a Markov head and a confidence head. The latter reads the row's state and the code of the previous
    token."""

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
        """Compute the layer. Attention and MLP each have one convolution before and one after them, whose dynamic
        kernels are computed from the normed input.

        x: [B, blocks * rows, hidden], the rows of all blocks of a sample one after another.
        Returns x's shape.
        """
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
    """Scores a row's tokens given the previous token: <predecessor[previous] * projection(state), successor[token]>."""

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


class DominoHead(BlockHead):
    """DFlash with a low-rank bias that depends on the path: a gated recurrent unit reads its tokens, the anchor first.
    In training the path is the text's."""

    def __init__(self, method: Domino, objective: Objective) -> None:
        super().__init__(method, objective)
        hidden = method.model.hidden_size
        self.num_plain = method.num_plain
        self.prefix_gru = nn.GRU(hidden, method.state_size, bias=False, batch_first=True)
        reduce, successors = (
            linear(hidden + method.state_size, method.rank),
            linear(method.rank, method.model.vocab_size),
        )
        self.embed_proj = nn.Sequential(reduce, nn.SiLU(), successors)

    def initialise(self) -> None:
        for weight in self.prefix_gru.parameters():
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        nn.init.zeros_(self.embed_proj.get_parameter("2.weight"))  # starts as DFlash

    def use_target(self, target: PreTrainedModel) -> None:
        super().use_target(target)
        self._embedding = [target.get_input_embeddings()]  # a list: not a module of the head

    def score(self, states: Tensor, previous: Tensor) -> BlockScores:
        embedded = self._embedding[0](previous.flatten(0, -2)).detach().to(states.dtype)
        read, _ = self.prefix_gru(embedded)
        bias = self.embed_proj(torch.cat((states, read.view(*previous.shape, -1)), dim=-1))
        has_bias = torch.arange(previous.shape[-1], device=previous.device) >= self.num_plain
        return BlockScores(self.logits(states) + torch.where(has_bias[:, None], bias, 0.0))


@dataclass(frozen=True)
class BlockOptions:
    """Sizes of a new head.

    block_size: rows of a block, including the newest token.
    rank: rank of the Markov head, the selector or Domino's bias; unused by DFlash.
    causal: whether a row sees the block up to itself (JetSpec, arXiv 2606.18394), not the whole of it.
    intermediate_size: width of the layers' MLP; None: the target's.
    """

    method: str
    block_size: int
    num_layers: int
    mask_token_id: int
    rank: int
    causal: bool = False
    intermediate_size: int | None = None


@dataclass(frozen=True)
class Published:
    """A published kind of block head.

    architecture, section, sizes: values of config.json; the method's own keys are in `section`, or at the top level.
    rank_key, state_key: names of the rank and of the size of a path's state in config.json.
    tv_weight: see `Objective`.
    """

    method: type[DFlash]
    head: Callable[[Any, Objective], BlockHead]
    architecture: str
    section: str | None = "dflash_config"
    rank_key: str | None = None
    state_key: str | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict)
    tv_weight: float = 0.0


_MARKOV = {"markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True}
_PATH = {"projector_type": "domino", "pure_draft_prefix_len": 1, "shift_label": True}
_SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_top_k": 16}
KINDS = {  # by `--method`
    "dflash": Published(DFlash, BlockHead, "DFlashDraftModel"),
    "dspark": Published(
        DSpark, DSparkHead, "Qwen3DSparkModel", None, rank_key="markov_rank", sizes=_MARKOV, tv_weight=0.9
    ),
    "dflash2": Published(DFlash2, DFlash2Head, "DFlash2DraftModel", rank_key="selector_rank", sizes=_SELECTOR),
    "domino": Published(
        Domino, DominoHead, "DominoDraftModel", rank_key="emb_dim", state_key="gru_hidden_dim", sizes=_PATH
    ),
}


def block_config(target: PreTrainedModel, options: BlockOptions) -> dict[str, Any]:
    """Return the config.json of a new head. Raises `TrainingError` for a target of an unsupported architecture."""
    shared, config, kind = head_config(target, _MODEL_TYPES), target.config, KINDS[options.method]
    layers = captured_layers(config.num_hidden_layers)
    own: dict[str, Any] = {"mask_token_id": options.mask_token_id, "target_layer_ids": layers, **kind.sizes}
    if kind.rank_key is not None:
        own[kind.rank_key] = options.rank
    if kind.state_key is not None:
        own[kind.state_key] = min(_MAX_STATE, config.hidden_size)
    if options.causal:
        own["is_causal" if kind.section is None else "causal"] = True
    # Qwen3's layers rotate a head's full width
    partial = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
    return {
        **shared,
        "intermediate_size": options.intermediate_size or config.intermediate_size,
        "model_type": "qwen3",
        "num_hidden_layers": options.num_layers,
        "rope_parameters": {key: value for key, value in config.rope_parameters.items() if key not in partial},
        "dtype": "bfloat16",
        "block_size": options.block_size,
        "num_target_layers": config.num_hidden_layers,
        "architectures": [kind.architecture],
        **(own if kind.section is None else {kind.section: own}),
    }


def build_block_head(target: PreTrainedModel, method: DFlash, objective: Objective, seed: int) -> BlockHead:
    """Return a new float32 head on the target's device."""
    torch.manual_seed(seed)
    head = KINDS[method.name].head(method, objective)
    for module in head.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=module.in_features**-0.5)
    head.initialise()
    head.use_target(target)
    return head.to(target.device)


def load_block_head(folder: Path, kind: str, target: PreTrainedModel) -> tuple[BlockHead, DraftVocabulary]:
    """Return a saved head and the tokens that it may propose. Raises `TrainingError` for one that the engine
    refuses."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    objective = Objective(KINDS[kind].tv_weight)
    head = build_block_head(target, read_head(KINDS[kind].method, config, target, folder), objective, 0)
    head.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()})
    return head, DraftVocabulary.whole(target)


class BlockKind(DraftKind):
    """A new DFlash, DSpark, DFlash2 or Domino head with the target's vocabulary."""

    def __init__(self, arguments: argparse.Namespace, target: PreTrainedModel) -> None:
        super().__init__(arguments, target)
        self.kind: str = arguments.method
        self.refuse_head_options(self.kind, allowed=("intermediate_size",))
        mask = arguments.mask_token
        if mask is None:
            mask = target.config.pad_token_id
        if mask is None:
            raise TrainingError("mask_token: the target has no padding token to use; give the id of an unused token")
        weight = KINDS[self.kind].tv_weight if arguments.tv_weight is None else arguments.tv_weight
        self.objective = Objective(weight)
        sizes = arguments.block_size, arguments.draft_layers, mask, arguments.head_rank
        options = BlockOptions(self.kind, *sizes, arguments.causal, arguments.intermediate_size)
        self.config = block_config(target, options)
        self.method = read_head(KINDS[self.kind].method, self.config, target, arguments.output)

    def unrolling(self) -> Unrolling:
        decay = math.exp(-1 / self.arguments.gamma)
        arguments = self.arguments
        return Unrolling(self.method.form.max_depth, decay, arguments.anchors, arguments.random_depths)

    def build(self, samples: Sequence[Sample], stops: Sequence[int]) -> tuple[TrainedDraft, DraftVocabulary]:
        head = build_block_head(self.target, self.method, self.objective, self.arguments.seed)
        return head, DraftVocabulary.whole(self.target)

    def save(self, head: TrainedDraft, vocabulary: DraftVocabulary, folder: Path) -> None:
        write_checkpoint(folder, self.config, dict(head.named_parameters()))

    def load(self, folder: Path) -> tuple[TrainedDraft, DraftVocabulary]:
        return load_block_head(folder, self.kind, self.target)
