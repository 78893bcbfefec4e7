"""Parts of drafts over whole sequences, with gradients: transformers' layers, given attention over branches and experts
that a CUDA graph can capture; drafts of one token per step; and steps replayed from CUDA graphs.

A layer uses them if its configuration comes from `layer_config`. Tests compare every draft with the engine's.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from aerie.speculative.training.draft import DraftVocabulary, TrainedDraft, Unrolling
from aerie.speculative.training.losses import draft_loss, view_target
from aerie.speculative.training.samples import Batch
from aerie.workers.models.llama import LlamaConfig

# Up to this many experts, every row goes through all of them: a few wide products without a device sync, which a CUDA
# graph can capture.
MAX_DENSE_EXPERTS = 64


def layer_config(config: PreTrainedConfig, attention: Callable[..., Any], **changes: Any) -> PreTrainedConfig:
    """Return a copy of a configuration of transformers, whose layers use this attention function, and `dense_experts`
    if they have few experts.

    attention: one of the functions registered in this module.
    changes: other fields to set.
    """
    copied = copy.deepcopy(config)
    copied._attn_implementation = attention.__name__
    experts = [getattr(config, name, None) or 0 for name in ("num_local_experts", "num_experts")]
    copied._experts_implementation = dense_experts.__name__ if max(experts) <= MAX_DENSE_EXPERTS else "eager"
    for name, value in changes.items():
        setattr(copied, name, value)
    return copied


def qwen3_config(model: LlamaConfig, attention: Callable[..., Any]) -> PreTrainedConfig:
    """Return `layer_config` of the engine's description of layers without biases."""
    sizes = {"num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads}
    sizes |= {"hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size}
    config = Qwen3Config(**sizes, num_hidden_layers=1, head_dim=model.head_dim, rms_norm_eps=model.rms_eps)
    return layer_config(config, attention)


@dataclass
class Branches:
    """Keys and values [B, kv_heads, T, head_dim] of step 0 (the prefix) and of each later step (the branches)."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def branch_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    dropout: float = 0.0,
    *,
    branches: Branches,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the attention of row n to rows 0..n of the first step and to row n of every later step, up to this one, as
    transformers' `AttentionInterface`. A later step's scores take B * heads * T * T elements, once also in float32.

    query: [B, heads, T, key dim].
    key: [B, kv_heads, T, key dim].
    value: [B, kv_heads, T, value dim].
    branches: keys and values of earlier steps; this step's are appended.
    Returns [B, T, heads, value dim].
    """
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotated in float32
    branches.keys.append(key)
    branches.values.append(value)
    if len(branches.keys) == 1:
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return attended.transpose(1, 2), None
    length = query.shape[2]
    batch, kv_heads = key.shape[:2]
    query = query.reshape(batch, kv_heads, -1, length, query.shape[3]) * scaling
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    prefix = (query @ branches.keys[0][:, :, None].transpose(-1, -2)).masked_fill(future, float("-inf"))
    own = [(query * part[:, :, None]).sum(-1, keepdim=True) for part in branches.keys[1:]]
    weights = torch.softmax(torch.cat([prefix, *own], dim=-1).float(), dim=-1).to(query.dtype)
    attended = weights[..., :length] @ branches.values[0][:, :, None]
    for step, part in enumerate(branches.values[1:]):
        attended = attended + weights[..., length + step, None] * part[:, :, None]
    return attended.flatten(1, 2).transpose(1, 2), None


def dense_experts(experts: Any, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
    """Run all experts as one wide gated MLP, in which experts that were not chosen have weight 0.

    experts: transformers' module.
    x: [N, H].
    chosen: [N, k] int64.
    weight: [N, k].
    Returns [N, H].
    """
    count = len(experts.down_proj)
    share = torch.zeros(len(x), count, dtype=weight.dtype, device=x.device).scatter(1, chosen, weight)
    both = functional.linear(x, experts.gate_up_proj.flatten(0, 1))
    gate, up = both.view(len(x), count, 2, -1).unbind(2)
    inner = functional.silu(gate) * up * share.to(up.dtype)[..., None]
    return functional.linear(inner.flatten(1), experts.down_proj.transpose(0, 1).flatten(1))


AttentionInterface.register(branch_attention.__name__, branch_attention)
ALL_EXPERTS_FUNCTIONS.register(dense_experts.__name__, dense_experts)


def prepared(layer: nn.Module, norm_offset: float = 0.0) -> nn.Module:
    """Let torch's fused kernel compute the layer's norms, and routers choose in float32 under autocast, as the engine's
    do. norm_offset: added to the weights of norms. Changes the layer in place."""
    for module in layer.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_fused_norm, module, norm_offset)
        elif type(module).__name__.lower().endswith("topkrouter"):
            module.forward = partial(_float32, module.forward)
    return layer


def _fused_norm(norm: Any, offset: float, x: Tensor) -> Tensor:
    weight = (norm.weight + offset).to(x.dtype)  # a float32 weight would miss the fused kernel under autocast
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return functional.rms_norm(x, weight.shape, weight, eps)


def _float32(forward: Any, x: Tensor) -> Any:
    with torch.autocast(x.device.type, enabled=False):
        return forward(x.float())


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer without bias."""
    return nn.Linear(inputs, outputs, bias=False)


class ChainDraft(TrainedDraft):
    """A draft of one token per step, which continues from its own state."""

    @abstractmethod
    def start(self, captured: Tensor) -> Tensor:
        """Return the state [B, T, H] that the first step reads, from the target's features [B, T, F]."""

    @abstractmethod
    def step(self, embeddings: Tensor, hidden: Tensor, angles: tuple[Tensor, Tensor], branches: Branches) -> Tensor:
        """Return the recurrent state [B, T, H] after one step.

        embeddings, hidden: [B, T, H] embedding of the token that each row reads, and the previous state.
        angles: rotary angles of the rows.
        """

    def unroll(self, embeddings: Tensor, captured: Tensor, num_steps: int) -> list[Tensor]:
        hidden, branches, steps = self.start(captured), Branches(), []
        rows = torch.arange(embeddings.shape[1], dtype=torch.float32, device=embeddings.device)
        for step in range(num_steps):
            # row n reads token n + step + 1; zeros at the end
            read = functional.pad(embeddings[:, step + 1 :], (0, 0, 0, min(step + 1, len(rows))))
            hidden = self.step(read, hidden, self.angles(rows[None] + step), branches)
            steps.append(hidden)
        return steps

    def batch_loss(
        self,
        model: nn.Module,
        target: PreTrainedModel,
        vocabulary: DraftVocabulary,
        batch: Batch,
        unrolling: Unrolling,
    ) -> Tensor:
        view = view_target(target, batch, self, vocabulary)
        steps = model(view.embeddings, view.captured, unrolling.num_steps, batch.anchors)
        return draft_loss(steps, view, batch, unrolling.step_decay)

    def forward(self, embeddings: Tensor, captured: Tensor, num_steps: int, anchors: Tensor) -> list[Tensor]:
        """Return logits [A, draft vocabulary] of each step at flat positions `anchors` [A]; see `unroll`."""
        steps = self.unroll(embeddings, captured, num_steps)
        return [self.logits(hidden.flatten(0, 1)[anchors]) for hidden in steps]


class GraphedStep:
    """One step's loss and gradients, replayed from a CUDA graph for each batch shape. A small model's step is a
    thousand short kernels, and launching them takes several times longer than running them.

    All graphs write the same gradients and share one memory pool, so only the last replay's results are valid. The loss
    may neither read values back to the host nor branch on them.
    """

    def __init__(self, model: nn.Module, compute_loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]) -> None:
        self.model, self.compute_loss = model, compute_loss
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.gradients = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.captured: dict[tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, inputs: dict[str, Tensor]) -> Tensor:
        """The scalar loss; the parameters' `grad` are this batch's alone."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient  # the Trainer sets it to None after each step
        shapes = tuple(tensor.shape for tensor in inputs.values())
        if shapes not in self.captured:
            self.captured[shapes] = self._capture(inputs)
        graph, static, loss = self.captured[shapes]
        for name, tensor in inputs.items():
            static[name].copy_(tensor)
        graph.replay()
        return loss.clone()

    def _capture(self, inputs: dict[str, Tensor]) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Tensor]:
        """Capture a step for inputs of these shapes. Return the graph, the tensors that it reads, and its loss."""
        static = {name: tensor.clone() for name, tensor in inputs.items()}
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # a capture may not load kernels or plan library calls
                self._run(static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            loss = self._run(static)
        return graph, static, loss

    def _run(self, static: dict[str, Tensor]) -> Tensor:
        torch._foreach_zero_(self.gradients)
        loss = self.compute_loss(self.model, static)
        torch.autograd.backward(loss)
        return loss.detach()
