"""Published block heads at their real sizes go through `load_draft` on the meta device: names, shapes and vocabulary
must be what the checkpoint has, and the form what the published code makes of config.json."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from aerie.speculative.drafts import loading
from aerie.speculative.drafts.blocks.config import read_form
from aerie.speculative.drafts.blocks.dflash import DFlash
from aerie.speculative.drafts.registry import METHODS, read_draft
from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.models.llama import LlamaConfig, LlamaForCausalLM, read_config, weight_names
from aerie.workers.models.loading import allocate
from aerie.workers.models.weights import CheckpointTensor
from aerie.workers.quantization.table import Unquantized
from tests.support.drafts.published_blocks import BLOCKS, META, QWEN8B, PublishedBlock, z_lab

LAYERS = {"Qwen3-8B": 36, "Qwen3.6-27B": 64, "Qwen3.6-35B-A3B": 40, "gemma-4-31B-it": 60}


def target_of(head: PublishedBlock) -> LlamaConfig:
    """A Llama of the target's width, depth and vocabulary."""
    given = {key: head.layers[key] for key in ("hidden_size", "vocab_size")}
    sizes = {"intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    return read_config(given | sizes | {"num_hidden_layers": LAYERS[head.target], "rms_norm_eps": 1e-6}, "target")


@pytest.mark.parametrize("name", BLOCKS)
def test_published_block_heads_load_as_they_are(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = BLOCKS[name]
    config = target_of(head)
    monkeypatch.setattr("aerie.speculative.drafts.registry.read_config_json", lambda path: dict(head.config))
    method = read_draft(head.method, str(tmp_path), "target", config)
    assert isinstance(method, DFlash)
    assert [kind for kind, classes in METHODS.items() if any(each.recognises(head.config) for each in classes)] == [
        head.method
    ]
    assert (method.capture, method.form.max_depth) == (head.capture, head.depth)
    assert tuple(view.window(method.form.size) for view in method.form.views) == head.windows
    assert method.scales.soft_cap == head.config.get("final_logit_softcapping")

    tensors = head.tensors()
    assert len(tensors) == head.num_tensors
    target = allocate(
        lambda: LlamaForCausalLM(config, SOLO, 4, torch.device("cpu")),
        weight_names(config),
        Unquantized(),
        torch.bfloat16,
        META,
    )
    given = [CheckpointTensor(tensor, value, "model.safetensors") for tensor, value in tensors.items()]
    monkeypatch.setattr(loading, "draft_tensors", lambda path, device: given)
    model = loading.load_draft(method, ModelSource(path="target"), target, SOLO, META, max_position=4)
    assert (model.lm_head is target.lm_head) == (not head.own_tables)
    assert (model.target_ids is None) == (not head.config.get("draft_vocab_size"))


def test_without_layer_types_the_windows_are_those_of_qwen3s_configuration() -> None:
    """z-lab's drafts have a Qwen3Config, which derives the kinds of layers."""
    full = z_lab(QWEN8B, 36, [1], 151669, use_sliding_window=True, sliding_window=2048, max_window_layers=3)
    del full["layer_types"]
    windows = [view.context for view in read_form("d", full, 5, 151936).views]
    kinds = Qwen3Config(**{key: full[key] for key in ("use_sliding_window", "max_window_layers")}, num_hidden_layers=5)
    assert windows == [2047 if kind == "sliding_attention" else None for kind in kinds.layer_types or ()]
    assert windows.count(None) == 3
