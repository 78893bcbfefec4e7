"""Checkpoints of DeepSeek-V3's architecture in the published layout: the module for multi-token prediction is one more
layer after the target's, with `enorm`, `hnorm`, `eh_proj` and `shared_head.norm`.

Embedding and vocabulary head of the module are the target's; the copies that the published checkpoints have of them
(`embed_tokens`, `shared_head.head`) nobody needs, and they are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from speculative.draft_models.mtp import ARCHITECTURES, Mtp
from speculative.training.draft_files import make_readable
from speculative.training.errors import TrainingError
from speculative.training.mtp_model import MtpHead
from workers.models.deepseek import read_config
from workers.models.weights import checkpoint_tensors

_EXPERTS = "mlp.experts."
_SCALE = "_scale_inv"


def layer_tensors(layer: nn.Module, name: str) -> dict[str, Tensor]:
    """A `DeepseekLayer`'s by their published names; `name` is the layer's."""
    tensors = {}
    for path, tensor in layer.state_dict().items():
        if not path.startswith(_EXPERTS):
            tensors[f"{name}.{path}"] = tensor
            continue
        parts = {"down_proj": tensor}
        if path.endswith("gate_up"):
            parts = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True))
        for part, stacked in parts.items():
            tensors |= {f"{name}.{_EXPERTS}{i}.{part}.weight": matrix for i, matrix in enumerate(stacked)}
    return tensors


def module_tensors(head: MtpHead) -> dict[str, Tensor]:
    """The module's, by their published names."""
    name = f"model.layers.{head.method.layer}"
    own = {part: getattr(head, part).weight for part in ("enorm", "hnorm", "eh_proj")}
    own["shared_head.norm"] = head.norm.weight
    return {f"{name}.{part}.weight": weight for part, weight in own.items()} | layer_tensors(head.layer, name)


def read_module(folder: Path) -> MtpHead:
    """The module of a checkpoint, in float32 on the CPU. Raises `TrainingError` if it has none that can be trained."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not Mtp.recognises(raw):
        raise TrainingError(
            f"target={folder}: architectures={raw.get('architectures')} has no module for multi-token prediction; only "
            f"{', '.join(ARCHITECTURES)} has; train a head with --method eagle3"
        )
    try:
        method = Mtp.read(str(folder), raw, read_config(raw, f"target {folder}"))
        tensors = {name: tensor for name, tensor, _ in checkpoint_tensors(folder) if name.startswith(_layer_of(method))}
    except ValueError as error:
        raise TrainingError(str(error)) from None
    if any(name.endswith(_SCALE) or tensor.itemsize < 2 for name, tensor in tensors.items()):
        raise TrainingError(f"target={folder}: its module is quantised, which cannot be trained; give one in bfloat16")
    head = MtpHead(method)
    with torch.no_grad():
        for name, tensor in module_tensors(head).items():
            if name not in tensors:
                raise TrainingError(f"target={folder}: lacks {name}; download it again")
            tensor.copy_(tensors[name])
    return head


def _layer_of(method: Mtp) -> str:
    return f"model.layers.{method.layer}."


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """`config.json` and `model.safetensors`: in bfloat16, but for the biases of routers, which stay float32."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {
        name: tensor.detach().to("cpu", torch.float32 if name.endswith("bias") else torch.bfloat16).contiguous().clone()
        for name, tensor in tensors.items()
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    make_readable(folder)


def save_module(head: MtpHead, folder: Path) -> None:
    """The module alone, with the config.json of the target that it was trained for, as `speculative.path` takes it."""
    raw = json.loads((Path(head.method.path) / "config.json").read_text(encoding="utf-8"))
    write_checkpoint(folder, raw, module_tensors(head))


def write_generation_config(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Which tokens begin, end and pad a text; answers are greedy unless asked otherwise."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    settings = {name: getattr(tokenizer, name) for name in names} | {"do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
