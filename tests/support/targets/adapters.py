"""Random LoRA adapters that peft writes, and peft's merged models, which are the oracle of adapters."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import transformers_weight_conversion
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@contextlib.contextmanager
def experts_without_adapters() -> Iterator[None]:
    """Within the context, peft takes names such as `gate_proj` for those of modules, as it does with transformers 4,
    and not for routed experts' parameters."""
    with mock.patch.dict(transformers_weight_conversion._MOE_TARGET_MODULE_MAPPING, clear=True):
        yield


def make_adapter(folder: Path, target: Path, seed: int, size: float = 0.5, **settings: Any) -> Path:
    """A random adapter of a target, saved by peft. size: of its part in results, compared with the layers' own.
    settings: of peft's `LoraConfig`; by default rank 8 in all linear layers."""
    given: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": list(ALL), **settings}
    base = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    torch.manual_seed(seed)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **given))
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            torch.nn.init.normal_(parameter, 0.0, parameter.shape[1] ** -0.5)
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, 0.0, size * parameter.shape[1] ** -0.5)
        if ".lora_embedding_A." in name:
            torch.nn.init.normal_(parameter)
        if ".lora_embedding_B." in name:
            rows = float(model.get_input_embeddings().weight.std())
            torch.nn.init.normal_(parameter, 0.0, size * rows * parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)
    return folder


def adapted_model(target: Path, adapter: Path | None, merges: bool = True) -> Any:
    """transformers' model in float32, with an adapter if one is given. merges: into its weights, by peft; else it runs
    as in training. These differ if embedding and head are tied and one is adapted: peft then merges it into both."""
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager")
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
        model = model.merge_and_unload() if merges else model
    return model


def merged_tokens(
    target: Path, adapter: Path | None, prompts: Sequence[list[int]], max_tokens: int, eos: int, merges: bool = True
) -> Any:
    """Greedy tokens of `adapted_model`."""
    model = adapted_model(target, adapter, merges)
    found = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=eos,
                pad_token_id=0,
            )
            found.append(out[0, len(prompt) :].tolist())
    return found


def make_draft_adapter(folder: Path, draft: Path, seed: int, size: float = 0.5, rank: int = 8) -> Path:
    """A random adapter of all matrices of an EAGLE or EAGLE-3 head, in the folder of the target's adapter. size: as in
    `make_adapter`."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, weight in load_file(draft / "model.safetensors").items():
        if name.endswith(("_proj.weight", "fc.weight")):
            module, (outputs, inputs) = f"base_model.model.{name.removesuffix('.weight')}", weight.shape
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
            tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * size * rank**-0.5
    (folder / "draft").mkdir()
    save_file(tensors, folder / "draft" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (folder / "draft" / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged_checkpoints(target: Path, draft: Path, adapter: Path, folder: Path) -> tuple[Path, Path]:
    """Write target and draft, each merged with its part of an adapter. Return their folders."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(target), str(adapter)).merge_and_unload()
    model.float().save_pretrained(folder / "target")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (target / name).exists():
            (folder / "target" / name).write_bytes((target / name).read_bytes())
    tensors = load_file(draft / "model.safetensors")
    matrices = load_file(adapter / "draft" / "adapter_model.safetensors")
    config = json.loads((adapter / "draft" / "adapter_config.json").read_text())
    for name in [name for name in matrices if ".lora_A." in name]:
        module = name.removesuffix(".lora_A.weight")
        product = matrices[f"{module}.lora_B.weight"].float() @ matrices[name].float()
        weight = f"{module.removeprefix('base_model.model.')}.weight"
        tensors[weight] = tensors[weight].float() + product * config["lora_alpha"] / config["r"]
    (folder / "draft").mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "draft" / "model.safetensors")
    (folder / "draft" / "config.json").write_bytes((draft / "config.json").read_bytes())
    return folder / "target", folder / "draft"
