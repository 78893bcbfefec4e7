"""A tiny assistant of Gemma 4, and what transformers' module computes over the KV of a text."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.tiny_models import HIDDEN, VOCAB

CENTROIDS = 12


def make_assistant(
    folder: Path, target: Path, ordered: bool = False, copying: bool = False, seed: int = 1, **overrides: Any
) -> Path:
    """A random assistant for `target`. ordered: its head is evaluated in clusters. copying: it proposes the token that
    it is given, mostly. overrides: of its text_config."""
    import transformers

    raw = json.loads((target / "config.json").read_text())
    raw = raw.get("text_config", {}) | raw
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN if copying else 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "attention_k_eq_v": bool(raw.get("attention_k_eq_v")),
        "num_global_key_value_heads": raw.get("num_global_key_value_heads"),
        "sliding_window": raw["sliding_window"],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": False,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        **overrides,
    }
    kind = "Gemma4Unified" if raw["architectures"][0].startswith("Gemma4Unified") else "Gemma4"
    if kind == "Gemma4Unified":
        for name in ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "use_double_wide_mlp"):
            settings.pop(name)
    config = getattr(transformers, f"{kind}AssistantConfig")(
        text_config=getattr(transformers, f"{kind}TextConfig")(**settings),
        backbone_hidden_size=HIDDEN,
        use_ordered_embeddings=ordered,
        num_centroids=CENTROIDS,
        centroid_intermediate_top_k=11 if copying else 5,
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}AssistantForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    for layer in model.model.layers:
        torch.nn.init.uniform_(layer.layer_scalar, 0.5, 1.5)
    if ordered:
        model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    if copying:
        _copy(model, load_file(str(target / "model.safetensors"))["model.embed_tokens.weight"])
    model.save_pretrained(folder)
    return folder


def _copy(model: Any, embedding: Tensor) -> None:
    """Let the layers add little to the token's embedding, which the head finds again."""
    model.pre_projection.weight.data = torch.eye(HIDDEN, 2 * HIDDEN)
    model.model.embed_tokens.weight.data.copy_(embedding)
    model.model.norm.weight.data.fill_(1.0)
    for layer in model.model.layers:
        layer.layer_scalar.fill_(1.0)
        for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
            norm.weight.data.mul_(0.01)


class Reference:
    """transformers' target over `ids` [n], and its assistant after them.

    hidden: [n, hidden] final states. The KV of layers with a window is cut to what a row after the text sees.
    """

    def __init__(self, target: Path, assistant: Path, ids: Tensor) -> None:
        import transformers

        whole = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        (architecture,) = json.loads((assistant / "config.json").read_text())["architectures"]
        self.assistant = getattr(transformers, architecture).from_pretrained(assistant, dtype=torch.float32)
        self.embedding, self.position = whole.get_input_embeddings(), ids.shape[0]
        out = whole(ids[None], use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
        self.hidden = out.hidden_states[-1][0]
        torch.testing.assert_close(self.hidden, whole.model(ids[None]).last_hidden_state[0])  # after the last norm
        seen = whole.config.sliding_window - 1
        self.kv = dict(out.shared_kv_states)
        self.kv["sliding_attention"] = tuple(each[:, :, -seen:] for each in self.kv["sliding_attention"])

    def step(self, token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [vocabulary] after `token` and the state that takes the place of state [hidden]."""
        inputs = torch.cat((self.embedding(torch.tensor([[token]])), state[None, None]), dim=-1)
        out = self.assistant(
            inputs_embeds=inputs, position_ids=torch.tensor([[self.position]]), shared_kv_states=self.kv
        )
        return out.logits[0, 0], out.last_hidden_state[0, 0]
