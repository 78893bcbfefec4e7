"""Rounds of requests with LoRA adapters beside rounds without, with dummy weights.

    python -m tests.bench adapter_rounds [--model llama-3.1-8b] [--shapes plain tree] [--batches 1 8 32]
                                         [--adapters 1 4 32] [--ranks 16 64] [--vocabulary] [--experts]

The median round in ms while all requests run, prompts of 512 tokens: in an engine without adapters, in one with
adapters that no request uses, and with requests that share 1, 4 or 32 adapters of all linear layers; with
`--vocabulary` also of embedding and head; with `--experts` of routed experts and attention, in 8 layers of
Qwen3-30B-A3B. Needs a GPU for figures that mean anything; `--tiny` tries it on a CPU.
"""

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from aerie.deploy.bench.figures import table
from aerie.speculative.build import EngineSpec, local_engine
from aerie.workers.config import LoraConfig
from aerie.workers.scheduling.plan import SamplingParams
from tests.bench.kernels.gpu_time import hardware
from tests.bench.machine import commit
from tests.bench.prompts import random_prompts
from tests.bench.round import MODELS, Setting, add_engine_options, engine_spec, model_of, timed, write_checkpoints
from tests.support.replica import Dimensions


def write_adapter(folder: Path, size: Dimensions, rank: int, vocabulary: bool = False) -> Path:
    """Write a random adapter of all linear layers, as peft does. vocabulary: also of embedding and head."""
    folder.mkdir(parents=True)
    heads, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
    shapes = {
        "self_attn.q_proj": (size.hidden, heads),
        "self_attn.k_proj": (size.hidden, kv),
        "self_attn.v_proj": (size.hidden, kv),
        "self_attn.o_proj": (heads, size.hidden),
        "mlp.gate_proj": (size.hidden, size.mlp),
        "mlp.up_proj": (size.hidden, size.mlp),
        "mlp.down_proj": (size.mlp, size.hidden),
    }
    down = {k: (torch.randn(rank, k) * k**-0.5).bfloat16() for k in {k for k, _ in shapes.values()}}
    up = {n: (torch.randn(n, rank) * 0.01).bfloat16() for n in {n for _, n in shapes.values()}}
    tensors = {}
    if vocabulary:
        hidden, ids = ((torch.randn(rank, n) * 0.02).bfloat16() for n in (size.hidden, size.vocab))
        head, embedding = (f"base_model.model.{module}" for module in ("lm_head", "model.embed_tokens"))
        tensors |= {f"{head}.lora_A.weight": hidden, f"{head}.lora_B.weight": ids.T.contiguous()}
        tensors |= {f"{embedding}.lora_embedding_A": ids, f"{embedding}.lora_embedding_B": hidden.T.contiguous()}
    for layer in range(size.layers):
        for name, (k, n) in shapes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors |= {f"{module}.lora_A.weight": down[k].clone(), f"{module}.lora_B.weight": up[n].clone()}
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


MOE = Dimensions(2048, 32, 4, 128, 768, 151936, 0, 8)  # Qwen3-30B-A3B; mlp: width of an expert
TINY_MOE = Dimensions(64, 4, 2, 16, 48, 256, 0, 2)
NUM_EXPERTS = {MOE: 128, TINY_MOE: 8}


def write_moe(folder: Path, size: Dimensions) -> None:
    """Write config.json of a Qwen3 with experts; the weights are dummies."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": size.hidden,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "moe_intermediate_size": size.mlp,
        "intermediate_size": size.mlp,
        "num_experts": NUM_EXPERTS[size],
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": size.layers,
        "vocab_size": size.vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
    (folder / "target").mkdir()
    (folder / "target" / "config.json").write_text(json.dumps(config))


def write_expert_adapter(folder: Path, size: Dimensions, rank: int) -> Path:
    """Write a random adapter of attention and routed experts, these as peft wraps stacked parameters."""
    folder.mkdir()
    count, heads, kv = NUM_EXPERTS[size] * rank, size.heads * size.head_dim, size.kv_heads * size.head_dim
    shapes = {  # ranks, inputs, outputs
        "self_attn.q_proj": (rank, size.hidden, heads),
        "self_attn.k_proj": (rank, size.hidden, kv),
        "self_attn.v_proj": (rank, size.hidden, kv),
        "self_attn.o_proj": (rank, heads, size.hidden),
        "mlp.experts.base_layer": (count, size.hidden, 2 * size.mlp),
        "mlp.experts": (count, size.mlp, size.hidden),
    }
    tensors = {}
    for name, (ranks, inputs, outputs) in shapes.items():
        down, up = torch.randn(ranks, inputs) * inputs**-0.5, torch.randn(outputs, ranks) * 0.01
        for layer in range(size.layers):
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors |= {f"{module}.lora_A.weight": down.bfloat16(), f"{module}.lora_B.weight": up.bfloat16()}
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "peft_version": "0.21.2"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def round_ms(spec: EngineSpec, batch: int, setting: Setting, counts: Sequence[int]) -> list[float]:
    """Return ms per round with each number of adapters, in one engine."""
    prompts = random_prompts(spec.worker.model, batch, setting.prompt_tokens)
    names = [] if spec.worker.lora is None else list(spec.worker.lora.modules)
    found = []
    with local_engine(spec) as engine:
        for count in counts:
            sampling = [
                replace(SamplingParams(setting.output_tokens, 0.0), adapter=names[i % count] if count else "")
                for i in range(batch)
            ]
            found.append(min(timed(engine, prompts, sampling).full_ms for _ in range(setting.repeats + 1)))
    return found


def written(folder: Path, name: str, arguments: argparse.Namespace) -> dict[int, Path]:
    """Write the target, and an adapter of each rank. Return their folders by rank."""
    if arguments.experts:
        size = TINY_MOE if arguments.tiny else MOE
        write_moe(folder, size)
        return {rank: write_expert_adapter(folder / f"rank-{rank}", size, rank) for rank in arguments.ranks}
    write_checkpoints(folder, name)
    return {
        rank: write_adapter(folder / f"rank-{rank}", MODELS[name], rank, arguments.vocabulary)
        for rank in arguments.ranks
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, ["plain", "tree"], [1, 8, 32])
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--vocabulary", action="store_true")
    parser.add_argument("--experts", action="store_true")
    arguments = parser.parse_args()
    setting = Setting(40, 24) if arguments.tiny else Setting(output_tokens=128)
    name, rows = model_of(arguments), []
    title = (
        f"experts of {'a tiny model' if arguments.tiny else 'qwen3-30b-a3b, 8 layers'}" if arguments.experts else name
    )
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        paths = written(folder, name, arguments)
        for shape in arguments.shapes:
            for batch in arguments.batches:
                spec = engine_spec(folder, shape, batch, setting, 1, True)
                (without,) = round_ms(spec, batch, setting, [0])
                for rank, path in paths.items():
                    counts = [0, *(count for count in arguments.adapters if count <= batch)]
                    modules = {f"a{i}": str(path) for i in range(counts[-1])}
                    lora = LoraConfig(modules, max(1, counts[-1]), rank, experts=arguments.experts)
                    adapted = dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, lora=lora))
                    for count, ms in zip(counts, round_ms(adapted, batch, setting, counts), strict=True):
                        rows.append(
                            (shape, batch, rank, count, round(without, 3), round(ms, 3), round(ms / without, 3))
                        )
                        print(*rows[-1], flush=True)
                    if torch.cuda.is_available():
                        torch.cuda.empty_cache()
    titles = ["shape", "batch", "rank", "adapters", "without, ms", "with, ms", "ratio"]
    print(*table(titles, rows), sep="\n")
    print(
        json.dumps(
            {"bench": "adapter_rounds", "hardware": hardware(), "commit": commit(), "model": title, "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
