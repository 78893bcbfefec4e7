"""Which architectures can be a target."""

from workers.models.config import ModelConfig

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def check_target(config: ModelConfig, source: str) -> None:
    """Raise ValueError naming what is supported if `config` cannot be served as a target."""
    if config.architecture not in ARCHITECTURES:
        raise ValueError(
            f"{source}: architecture {config.architecture} is not supported as a target; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"{source}: num_attention_heads={config.num_heads} is no multiple of "
            f"num_key_value_heads={config.num_kv_heads}"
        )


def check_tensor_parallel(config: ModelConfig, tensor_parallel: int, source: str) -> None:
    """Raise ValueError with sizes that work if the model cannot be cut into `tensor_parallel` shards."""

    def fits(size: int) -> bool:
        kv = config.num_kv_heads
        kv_fits = kv % size == 0 if kv >= size else size % kv == 0
        return config.num_heads % size == 0 and config.intermediate_size % size == 0 and kv_fits

    if not fits(tensor_parallel):
        works = [n for n in range(1, config.num_heads + 1) if fits(n)]
        raise ValueError(
            f"tensor_parallel={tensor_parallel}: does not divide {source} "
            f"(num_attention_heads={config.num_heads}, num_key_value_heads={config.num_kv_heads}, "
            f"intermediate_size={config.intermediate_size}); try one of {works}"
        )
