"""The unrolled head against a recomputation of each chain on its own, and the vocabulary maps and saved layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from aerie.kernels.rope.rope_store import rotate
from aerie.speculative.drafts.eagle3 import Eagle3
from aerie.speculative.training import TrainingError
from aerie.speculative.training.draft import DraftVocabulary
from aerie.speculative.training.eagle3 import (
    Eagle3Head,
    build_head,
    choose_vocabulary,
    draft_config,
    load_draft,
    read_draft_config,
    save_draft,
)
from aerie.speculative.training.samples import Sample


def draft_row(
    head: Eagle3Head, embedding: Tensor, feature: Tensor, position: int, keys: list[Tensor], values: list[Tensor]
) -> Tensor:
    """One row as a server drafts it: [H] and [H] -> [H], over a growing list of keys and values [kv_heads, D]."""
    layer, model = head.midlayer, head.method.model
    joined = torch.cat([layer.input_layernorm(embedding), layer.hidden_norm(feature)])
    angles = position * head.frequencies[None]
    query = rotate(layer.self_attn.q_proj(joined).view(1, -1, model.head_dim), angles.cos(), angles.sin())[0]
    key = rotate(layer.self_attn.k_proj(joined).view(1, -1, model.head_dim), angles.cos(), angles.sin())
    keys.append(key[0])
    values.append(layer.self_attn.v_proj(joined).view(-1, model.head_dim))
    group = model.num_heads // model.num_kv_heads
    mixed = []
    for place in range(model.num_heads):
        scores = torch.stack([query[place] @ k[place // group] for k in keys]) * model.head_dim**-0.5
        mixed.append(torch.softmax(scores, 0) @ torch.stack([v[place // group] for v in values]))
    hidden = feature + layer.self_attn.o_proj(torch.cat(mixed))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def test_step_s_equals_a_chain_drafted_alone_after_the_true_prefix(method: Eagle3) -> None:
    torch.manual_seed(2)
    length, num_steps = 11, 5
    head = Eagle3Head(method)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    embeddings = torch.randn(1, length, method.model.hidden_size)
    captured = torch.randn(1, length, 3 * method.model.hidden_size)
    with torch.no_grad():
        unrolled = head.unroll(embeddings, captured, num_steps)
        for anchor in range(length - 1):
            keys, values = list[Tensor](), list[Tensor]()
            features = head.fc(captured[0])
            for position in range(anchor + 1):
                hidden = draft_row(head, embeddings[0, position + 1], features[position], position, keys, values)
            for step in range(num_steps):
                if anchor + step + 1 >= length:
                    break
                if step > 0:
                    token = embeddings[0, anchor + step + 1]
                    hidden = draft_row(head, token, hidden, anchor + step, keys, values)
                # float32 sums in another order over five layers deep: measured below 2e-5 of the norm.
                error = (unrolled[step][0, anchor] - hidden).norm() / hidden.norm()
                assert error < 1e-4, (anchor, step)


def test_rows_of_a_longer_batch_do_not_change_with_what_follows(method: Eagle3) -> None:
    torch.manual_seed(3)
    head = Eagle3Head(method)
    embeddings, captured = torch.randn(2, 9, method.model.hidden_size), torch.randn(2, 9, 3 * method.model.hidden_size)
    with torch.no_grad():
        whole = head.unroll(embeddings, captured, 3)
        cut = head.unroll(embeddings[:, :6], captured[:, :6], 3)
    for step in range(3):
        torch.testing.assert_close(whole[step][:, : 5 - step], cut[step][:, : 5 - step])


def test_maps_between_the_vocabularies_agree() -> None:
    samples = [Sample((0, 0, 7, 7, 7, 4, 9), 2), Sample((3, 3, 4, 2), 3)]
    vocabulary = choose_vocabulary(samples, 4, 12, always=[11])
    assert vocabulary.target_ids.tolist() == [2, 4, 7, 11]
    assert [i + offset for i, offset in enumerate(vocabulary.d2t().tolist())] == [2, 4, 7, 11]
    assert vocabulary.d2t().dtype == torch.int64
    assert vocabulary.t2d.nonzero()[:, 0].tolist() == [2, 4, 7, 11]
    assert vocabulary.coverage(samples) == pytest.approx(5 / 6)


def test_a_draft_vocabulary_larger_than_the_target_s_is_refused() -> None:
    with pytest.raises(ValueError, match="draft_vocab=13: must be between 1 and the target's vocabulary of 12"):
        choose_vocabulary([], 13, 12, always=[2])


def test_a_saved_head_has_the_published_keys_and_loads_back(
    tmp_path: Path, target: PreTrainedModel, method: Eagle3
) -> None:
    vocabulary = DraftVocabulary.of(torch.arange(64) * 3, method.model.vocab_size)
    head = build_head(target, method, vocabulary, seed=0)
    save_draft(head, vocabulary, draft_config(target, 64) | {"eos_token_id": 2}, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    attention = [f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"]
    mlp = [f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    norms = [f"midlayer.{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    assert sorted(tensors) == sorted(
        [*attention, *mlp, *norms, "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"]
    )
    assert tensors["fc.weight"].shape == (32, 96) and tensors["fc.weight"].dtype == torch.bfloat16
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["eos_token_id"] == 2
    loaded, again = load_draft(tmp_path, target)
    assert loaded.method.capture == (2, 3, 4) and loaded.method.model.eos_token_ids == (2,)
    assert replace(loaded.method, path=method.path, model=method.model) == method
    assert replace(loaded.method.model, eos_token_ids=()) == method.model
    assert torch.equal(again.target_ids, vocabulary.target_ids)
    assert torch.equal(loaded.fc.weight, head.fc.weight.bfloat16().float())


def test_a_target_of_another_architecture_or_too_few_layers_is_refused(target: PreTrainedModel) -> None:
    target.config.num_hidden_layers = 6
    with pytest.raises(TrainingError, match="has 6 layers; EAGLE-3 captures three of at least 7"):
        draft_config(target, 64)
    target.config.model_type = "gpt2"
    with pytest.raises(TrainingError, match="model_type='gpt2' is not supported; use llama, qwen2, qwen3"):
        draft_config(target, 64)


def test_what_the_engine_would_refuse_is_not_trained(target: PreTrainedModel) -> None:
    target.config.mlp_bias = True
    with pytest.raises(TrainingError, match="target: mlp_bias=true is not supported"):
        read_draft_config(draft_config(target, 64), target, Path("draft"))
