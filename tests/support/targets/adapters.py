"""Random LoRA adapters that peft writes, and peft's merged models, which are the oracle of adapters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


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
    model.save_pretrained(folder)
    return folder


def merged_tokens(target: Path, adapter: Path | None, prompts: Sequence[list[int]], max_tokens: int, eos: int) -> Any:
    """Greedy tokens of transformers' model, merged with an adapter by peft; its own without one."""
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager")
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
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
