"""The EAGLE-3 head over whole sequences, unrolled on its own outputs.

The engine serves the head from the same description (`speculative.drafts.eagle3.Eagle3`) and the same files with
`speculative.drafts.eagle3.Eagle3Model`, which has no gradients and reads KV from pages;
`tests/speculative/training/test_training_serving.py` compares the two. Parameter names are those of the published
heads. Paper: EAGLE-3, arXiv 2503.01840, section 3.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from speculative.drafts.eagle3 import Eagle3
from speculative.drafts.layers import joined_input, projected
from speculative.training.layers import Branches, ChainDraft, branch_attention, linear, prepared, qwen3_config
from workers.models.llama import LlamaConfig


class DraftLayer(nn.Module):
    """The one decoder layer. It reads the concatenated embedding and feature; its residual stream is the feature.
    norm_before_residual: as in `speculative.drafts.eagle3_config.HeadFlags`."""

    def __init__(self, model: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        config = qwen3_config(model, branch_attention)
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, linear(2 * model.hidden_size, outputs))
        self.mlp = Qwen3MLP(config)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            Qwen3RMSNorm(model.hidden_size, eps=model.rms_eps) for _ in range(3)
        )

    def forward(self, embedding: Tensor, feature: Tensor, angles: tuple[Tensor, Tensor], branches: Branches) -> Tensor:
        """Return the residual stream after the layer, [B, T, H]. embedding, feature: [B, T, H]."""
        normed = self.hidden_norm(feature)
        joined = joined_input(self.input_layernorm(embedding), normed)
        residual = normed if self.norm_before_residual else feature
        attended, _ = self.self_attn(joined, position_embeddings=angles, attention_mask=None, branches=branches)
        hidden: Tensor = residual + attended
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return hidden


class Eagle3Head(ChainDraft):
    """The trainable head. Its token embedding is the target's, whose results are arguments."""

    def __init__(self, method: Eagle3) -> None:
        super().__init__(method, method.model)
        self.method = method
        model, flags, width = method.model, method.flags, len(method.capture) * method.target_hidden_size
        self.fc = nn.Linear(width, model.hidden_size, bias=method.projection_bias)
        self.input_norm = Qwen3RMSNorm(width, eps=model.rms_eps) if flags.norm_before_fc else None
        per_layer = method.capture if flags.fc_norm else ()
        self.fc_norm = nn.ModuleList([Qwen3RMSNorm(method.target_hidden_size, eps=model.rms_eps) for _ in per_layer])
        self.midlayer = DraftLayer(model, flags.norm_before_residual)
        self.norm = Qwen3RMSNorm(model.hidden_size, eps=model.rms_eps)
        self.lm_head = linear(model.hidden_size, method.vocab_size)
        prepared(self)

    def start(self, captured: Tensor) -> Tensor:
        """Project concatenated captured streams [.., 3H] to [.., H]."""
        return projected(captured, self.input_norm, self.fc_norm, self.fc)

    def step(self, embeddings: Tensor, hidden: Tensor, angles: tuple[Tensor, Tensor], branches: Branches) -> Tensor:
        """Return the state before the final norm, or after it if the head has norm_output."""
        state: Tensor = self.midlayer(embeddings, hidden, angles, branches)
        return self.norm(state) if self.method.flags.norm_output else state

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden if self.method.flags.norm_output else self.norm(hidden))
        return logits
