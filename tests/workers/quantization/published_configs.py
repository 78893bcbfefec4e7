"""quantization_config of published checkpoints of 4 and 8 bits, with the models that have them."""

from typing import Any

from tests.workers.models.test_published_configs import (
    KIMI_K2,
    LLAMA_8B,
    LLAMA_70B,
    QWEN3_8B,
    QWEN3_30B,
    QWEN25_72B,
    QWEN35_27B,
    QWEN35_35B,
    V3,
)

AWQ = {
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
GPTQ = {
    "batch_size": 1,
    "bits": 4,
    "block_name_to_quantize": None,
    "cache_block_outputs": True,
    "damp_percent": 0.01,
    "dataset": None,
    "desc_act": False,
    "exllama_config": {"version": 1},
    "group_size": 128,
    "modules_in_block_to_quantize": None,
    "quant_method": "gptq",
    "sym": True,
    "true_sequential": True,
    "use_exllama": True,
}
GPTQMODEL = {
    "bits": 4,
    "checkpoint_format": "gptq",
    "desc_act": False,
    "group_size": 128,
    "lm_head": False,
    "meta": {"damp_percent": 0.05, "quantizer": ["gptqmodel:2.2.0"], "true_sequential": True},
    "pack_dtype": "int32",
    "quant_method": "gptq",
    "sym": True,
}
AUTO_ROUND = {
    "autoround_version": "0.9.2",
    "bits": 4,
    "block_name_to_quantize": "model.layers",
    "data_type": "int",
    "group_size": 128,
    "packing_format": "auto_round:auto_gptq",
    "quant_method": "auto-round",
    "sym": True,
}
WEIGHTS = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 128,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}


def packed(ignore: list[str], targets: list[str] | None = None, **changes: Any) -> dict[str, Any]:
    group = {"input_activations": None, "output_activations": None, "targets": targets or ["Linear"]}
    return {
        "config_groups": {"group_0": group | {"weights": WEIGHTS | changes}},
        "format": "pack-quantized",
        "global_compression_ratio": None,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def w8a8(**changes: Any) -> dict[str, Any]:
    config = packed(["lm_head"], num_bits=8, group_size=None, strategy="channel", **changes)
    inputs = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True, "type": "int"}
    config["config_groups"]["group_0"]["input_activations"] = inputs
    return config | {"format": "int-quantized"}


# Kimi-K2-Thinking, moonshotai: only routed experts.
EXPERTS_ONLY = packed(
    ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"], group_size=32
)
# Qwen's own GPTQ-Int4 of Qwen3.5: only routed experts of mixtures; of dense models only MLPs.
QWEN35_GPTQ = {
    "bits": 4,
    "desc_act": False,
    "dynamic": {"-:.*attn.*": {}, "-:.*shared_expert.*": {}, "-:.*mtp.*": {}, "-:.*visual.*": {}, "lm_head": {}},
    "group_size": 128,
    "quant_method": "gptq",
    "sym": True,
}
ROUTERS = {f"model.layers.{i}.mlp.gate": {"bits": 16} for i in range(48)}
INT4, INT8 = "int4 in groups of 128", "int8 in groups of 128"


def _with(model: dict[str, Any], quantization: dict[str, Any]) -> dict[str, Any]:
    return model | {"quantization_config": quantization}


# config.json; formats of layers as `aerie plan` has them; GB of weights: parameters times the bytes of their format.
PUBLISHED: dict[str, tuple[dict[str, Any], str, float]] = {
    "Qwen/Qwen3-8B-AWQ": (_with(QWEN3_8B, AWQ), f"{INT4} (144), unquantised (1)", 6.18),
    "hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4": (
        _with(LLAMA_70B, AWQ),
        f"{INT4} (320), unquantised (1)",
        40.58,
    ),
    "DeepSeek-R1 in AWQ": (
        _with(V3, AWQ | {"group_size": 64}),
        "int4 in groups of 64 (363), int4 in groups of 64, dequantised (61), unquantised (1)",
        382.0,
    ),
    "Qwen/Qwen2.5-72B-Instruct-GPTQ-Int4": (
        _with(QWEN25_72B | {"intermediate_size": 29696}, GPTQ),
        f"{INT4} (320), unquantised (1)",
        41.4,
    ),
    "Qwen/Qwen2.5-72B-Instruct-GPTQ-Int8": (
        _with(QWEN25_72B | {"intermediate_size": 29696}, GPTQ | {"bits": 8}),
        f"{INT8} (320), unquantised (1)",
        76.7,
    ),
    "Qwen/Qwen3-30B-A3B-GPTQ-Int4": (_with(QWEN3_30B, GPTQMODEL), f"{INT4} (144), unquantised (1)", 16.6),
    "Qwen/Qwen3.5-35B-A3B-GPTQ-Int4": (_with(QWEN35_35B, QWEN35_GPTQ), f"unquantised (191), {INT4} (40)", 21.5),
    "Llama-3.1-70B by AutoGPTQ with desc_act": (
        _with(LLAMA_70B, GPTQ | {"desc_act": True}),
        f"{INT4}, of any inputs (320), unquantised (1)",
        39.6,
    ),
    "Intel/Qwen3-30B-A3B-Instruct-2507-int4-AutoRound": (
        _with(QWEN3_30B, AUTO_ROUND | {"extra_config": ROUTERS}),
        f"{INT4} (144), unquantised (1)",
        16.6,
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": (
        _with(LLAMA_8B, packed(["lm_head"], actorder="weight")),
        f"{INT4} (128), unquantised (1)",
        5.7,
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a16": (
        _with(LLAMA_8B, packed(["lm_head"], num_bits=8, group_size=None, strategy="channel")),
        "int8, a scale per output (128), unquantised (1)",
        9.08,
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8": (
        _with(LLAMA_8B, w8a8()),
        "int8, a scale per output (128), unquantised (1)",
        9.08,
    ),
    "moonshotai/Kimi-K2-Thinking": (
        _with(KIMI_K2, EXPERTS_ONLY),
        "unquantised (367), int4 in groups of 32 (60)",
        594.0,
    ),
    "Qwen3.6-27B by llm-compressor's AWQ": (
        _with(
            QWEN35_27B,
            packed(
                ["lm_head", "re:.*linear_attn.in_proj_a", "re:.*linear_attn.in_proj_b", "re:.*visual.*", "re:.*mtp.*"],
                group_size=32,
                symmetric=False,
            ),
        ),
        "int4 in groups of 32 (256), unquantised (49)",
        20.4,
    ),
}
# What is refused, and why.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "marlin": (
        GPTQ | {"checkpoint_format": "marlin"},
        "checkpoint_format='marlin' is not supported; only 'gptq',",
    ),
    "old marlin": (GPTQ | {"is_marlin_format": True}, "is_marlin_format=True is not supported; only False is"),
    "marlin 2:4": (packed([]) | {"format": "marlin-24"}, "format='marlin-24' is not supported for integer weights"),
    "int8 with zeros": (w8a8(symmetric=False), "weights.symmetric=False is not supported for int-quantized; only true"),
    "int8 activations beside packed codes": (
        w8a8() | {"format": "pack-quantized"},
        "config_groups.group_0.input_activations=.* is not supported with integer weights",
    ),
    "3 bits": (GPTQ | {"bits": 3}, "bits=3 is not supported; 4 and 8 bits are; use the checkpoint in bf16"),
    "5 bits": (packed([], num_bits=5), "num_bits=5 is not supported; 4 and 8 bits are"),
    "gemv": (AWQ | {"version": "gemv"}, "version='gemv' is not supported; only 'gemm' is"),
    "8 bits of AWQ": (AWQ | {"bits": 8}, "bits=8 is not supported; 4 bits are"),
    "rotation": (GPTQMODEL | {"rotation": "hadamard"}, "rotation='hadamard' is not supported: inputs would have to be"),
    "bitblas": (GPTQ | {"checkpoint_format": "bitblas"}, "checkpoint_format='bitblas' is not supported"),
    "other packing": (
        AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"},
        "packing_format='auto_round:llm_compressor' is not supported; only 'auto_round:auto_gptq'",
    ),
    "activations": (AUTO_ROUND | {"act_bits": 8}, "act_bits=8 is not supported; only 16, 32 is"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method='bitsandbytes' is not supp"),
    "gguf": ({"quant_method": "gguf"}, "quant_method='gguf' without the types of its weights; serve the .gguf file"),
    "quip": ({"quant_method": "quip"}, "quant_method='quip' is not supported; supported: auto-round, awq, "),
    "embedding": (packed([], ["Linear", "Embedding"]), "targets='Embedding' is not supported; of classes Linear is"),
    "no targets": (packed([]) | {"config_groups": {"group_0": {"weights": WEIGHTS}}}, "must name modules, such as"),
    "tensor": (packed([], strategy="tensor"), "weights.strategy='tensor' is not supported; 'group' and 'channel' are"),
    "transforms": (
        packed([]) | {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
        "transform_config=.* is not supported: inputs would have to be rotated",
    ),
    "sparsity": (
        packed([]) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config=.* is not supported; only dense weights are",
    ),
    "pattern": (packed(["re:(layers"]), r"ignore='\(layers' is no regular expression"),
    "group": (AWQ | {"group_size": 0}, "group_size=0 must be a number of inputs, or -1 for a scale per output"),
}
