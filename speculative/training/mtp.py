"""A target's module for multi-token prediction (MTP): read from its checkpoint, trained further, and saved.

The engine serves the same weights with `aerie.speculative.drafts.mtp.MtpModel`. In the paper (arXiv 2412.19437, section
2.2), each depth has a module of its own. Here one module drafts all depths, so it is trained on its own outputs
(training-time test of EAGLE-3, arXiv 2503.01840).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteDecoderLayer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

from aerie.speculative.drafts.mtp import DeepseekMtp, Mtp, QwenMtp
from aerie.speculative.training import TrainingError
from aerie.speculative.training.draft import DraftKind, DraftVocabulary, TrainedDraft, write_checkpoint
from aerie.speculative.training.layers import Branches, ChainDraft, branch_attention, layer_config, linear, prepared
from aerie.workers.layers.norm import ZeroCentredRMSNorm
from aerie.workers.models.registry import MTP_MODULES, family_of, mtp_modules_of
from aerie.workers.models.weights import checkpoint_tensors

# Name suffixes of tensors that stay in float32: router biases, and the decay of recurrent layers.
FLOAT32 = ("bias", "A_log")
_EXPERTS = ".mlp.experts."


_LAYERS: dict[str, type[nn.Module]] = {  # transformers' layers, by the model_type of their configuration
    "deepseek_v3": DeepseekV3DecoderLayer,
    "glm4_moe": Glm4MoeDecoderLayer,
    "glm4_moe_lite": Glm4MoeLiteDecoderLayer,
    "qwen3_5_text": Qwen3_5DecoderLayer,
    "qwen3_5_moe_text": Qwen3_5MoeDecoderLayer,
    "qwen3_next": Qwen3NextDecoderLayer,
}


class MtpHead(ChainDraft):
    """The trainable module; embedding and vocabulary head are the target's.

    config: transformers' configuration of the target.
    """

    def __init__(self, method: Mtp, config: PreTrainedConfig) -> None:
        model = method.model
        super().__init__(method, model)
        self.method = method
        last = config.num_hidden_layers  # the module's layer comes after the target's
        kinds = ["full_attention"] * (last + 1)
        experts = {"mlp_only_layers": [], "decoder_sparse_step": 1, "mlp_layer_types": ["sparse"] * (last + 1)}
        config = layer_config(config, branch_attention, layer_types=kinds, **experts)
        layer: Any = _LAYERS[config.model_type](config, last)
        self.layer, norm = layer, type(layer.input_layernorm)
        self.enorm, self.hnorm, self.norm = (norm(model.hidden_size, eps=model.rms_eps) for _ in range(3))
        self.eh_proj = linear(2 * model.hidden_size, model.hidden_size)
        prepared(self, norm_offset=float(method.norm is ZeroCentredRMSNorm))

    def start(self, captured: Tensor) -> Tensor:
        return captured

    def step(self, embeddings: Tensor, hidden: Tensor, angles: tuple[Tensor, Tensor], branches: Branches) -> Tensor:
        """Return the output of the last norm."""
        x = self.eh_proj(torch.cat((self.enorm(embeddings), self.hnorm(hidden)), dim=-1))
        state: Tensor = self.norm(self.layer(x, position_embeddings=angles, branches=branches))
        return state


def module_tensors(head: MtpHead) -> dict[str, Tensor]:
    """Return the module's tensors by their published names, without copies."""
    names, tensors = head.method.weight_names, {}
    for path, tensor in head.state_dict().items():
        first, _, rest = path.partition(".")
        tensors[f"{head.method.layer_name if first == 'layer' else names.module_name(first)}.{rest}"] = tensor
    return named_experts(tensors)


def named_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of transformers' layers by their published names: one matrix per expert, a view of the stacked
    ones."""
    named_tensors = {}
    for path, tensor in tensors.items():
        layer, experts, part = path.partition(_EXPERTS)
        if not experts:
            named_tensors[path] = tensor
            continue
        parts = {"down_proj": tensor}
        if part == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True))
        for name, stacked in parts.items():
            named_tensors |= {f"{layer}{_EXPERTS}{i}.{name}.weight": matrix for i, matrix in enumerate(stacked)}
    return named_tensors


def read_module(folder: Path) -> MtpHead:
    """Return the module of a checkpoint, in float32 on the CPU. Raises `TrainingError` if it has none that can be
    trained."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    modules = mtp_modules_of(raw)
    if modules is None:
        raise TrainingError(
            f"target={folder}: architectures={raw.get('architectures')} has no MTP module; only "
            f"{', '.join(MTP_MODULES)} have; train a head with --method eagle3"
        )
    try:
        source = f"target {folder}"
        target = family_of(raw["architectures"][0], source).read_config(raw, source)
        method: Mtp = (DeepseekMtp if modules.after_layers else QwenMtp).read(str(folder), raw, target)
        head = MtpHead(method, AutoConfig.from_pretrained(folder).get_text_config())
        wanted = module_tensors(head)
        tensors = {name: tensor for name, tensor, _ in checkpoint_tensors(folder)}
        for packed in method.weight_names.packed:
            for name in tensors.keys() - wanted.keys():
                tensors.update(packed.pieces(name, tensors[name]) or ())
    except ValueError as error:
        raise TrainingError(str(error)) from None
    if any(f"{name}_scale_inv" in tensors or tensors[name].itemsize < 2 for name in wanted.keys() & tensors.keys()):
        raise TrainingError(f"target={folder}: its module is quantised, which cannot be trained; give one in bfloat16")
    with torch.no_grad():
        for name, tensor in wanted.items():
            if name not in tensors:
                raise TrainingError(f"target={folder}: lacks {name}; download it again")
            tensor.copy_(tensors[name])
    return head


def save_module(head: MtpHead, folder: Path) -> None:
    """Write the module alone, with its target's config.json, in the layout that `speculative.path` accepts."""
    raw = json.loads((Path(head.method.path) / "config.json").read_text(encoding="utf-8"))
    write_checkpoint(folder, raw, module_tensors(head), FLOAT32)


class MtpKind(DraftKind):
    """The target's own MTP module, trained further."""

    def __init__(self, arguments: argparse.Namespace, target: PreTrainedModel) -> None:
        super().__init__(arguments, target)
        self.refuse_head_options("mtp")
        self.loaded = self.load(arguments.target)

    def build(self, samples: Sequence[Any], stops: Sequence[int]) -> tuple[TrainedDraft, DraftVocabulary]:
        return self.loaded

    def save(self, head: TrainedDraft, vocabulary: DraftVocabulary, folder: Path) -> None:
        assert isinstance(head, MtpHead)
        save_module(head, folder)

    def load(self, folder: Path) -> tuple[TrainedDraft, DraftVocabulary]:
        head = read_module(folder)
        head.use_target(self.target)
        return head.to(self.target.device), DraftVocabulary.whole(self.target)
