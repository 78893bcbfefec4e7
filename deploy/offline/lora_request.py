"""`LoRARequest`: names the LoRA adapter of a prompt, as vLLM's class of that name."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter, in a folder as peft saves it. Equal names are the same adapter, unless the path differs.

    lora_int_id: as in vLLM; not used.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
