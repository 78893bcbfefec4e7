"""Milliseconds per round of the engine without HTTP, with dummy weights and synthetic acceptance.

    python -m tests.bench round [--model llama-3.1-8b] [--shapes plain chain tree] [--batches 1 8 32 64 128]
                                [--prompt-tokens 512] [--output-tokens 256]

As peers were measured: prompts of 512 tokens, 256 output tokens, greedy, no prefix cache; (time of the whole batch -
time with max_tokens=1) / rounds, best of 2, acceptance length 3.0. Scheduling, plans and reading results are included.
full_ms is the median round while all requests run, without the batch's beginning and end. Beside it what torch's
profiler counts in steady rounds (graph launches, copies to the host, idle share), and the floor: the bytes that a round
must read over the rate at which this GPU copies its own memory, measured first. Markdown tables, then one JSON line.
Needs a GPU for figures that mean anything; `--tiny` tries it on a CPU. `--model dsv3-rank`: one rank's share of
DeepSeek-V3 at eight ranks, which its own module drafts for, and dsv3-layers, for `--tensor-parallel 2`
(`tests.bench.models.deepseek_rank`); `--model qwen3.5-27b`, qwen3.5-35b-a3b: hybrids (`tests.bench.models.hybrids`);
gpt-oss-20b, gemma-3-27b, qwen3-8b and the hybrid qwen3.8-27b with block drafts, and others:
`tests.bench.models.published`.
`--model-impl transformers` serves the model through the adapter, to compare it with the model's own class.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from aerie.attention.config import CacheConfig, DraftAttention, TargetAttention
from aerie.deploy.bench.figures import table
from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import Method, SpeculativeConfig
from aerie.speculative.drafts.recognition import method_of
from aerie.workers.config import Implementation, ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.models.config import read_config_json
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request, RequestOutput
from tests.bench.kernels.gpu_time import copy_bytes_per_s, hardware
from tests.bench.machine import commit
from tests.bench.models import configured
from tests.bench.models.published import BLOCK_DRAFTS
from tests.bench.prompts import random_prompts
from tests.bench.trace import device_events, figures, profile, start
from tests.support.replica import Dimensions, write_config

# hidden, heads, KV heads, head dim, MLP, vocabulary, draft vocabulary, layers
MODELS = {
    "llama-3.1-8b": Dimensions(4096, 32, 8, 128, 14336, 128256, 32000, 32),
    "llama-2-70b": Dimensions(8192, 64, 8, 128, 28672, 32000, 32000, 80),
    "llama-3-70b": Dimensions(8192, 64, 8, 128, 28672, 128256, 32000, 80),
    "tiny": Dimensions(64, 4, 2, 16, 96, 256, 64, 8),
}
# block-N: of drafts that draft a block of N rows in one pass; block-tree: 16 nodes of a block of 8; block-tree-N: N
# nodes of a block of 16
SHAPES = {
    "plain": None,
    "chain": (3, 1, 4),
    "tree": (5, 4, 8),
    "block-8": (7, 1, 8),
    "block-16": (15, 1, 16),
    "block-tree": (7, 4, 16),
    "block-8-tree-32": (7, 7, 32),
    **{f"block-tree-{width}": (15, 7, width) for width in (16, 24, 32, 48, 63, 128, 256)},
}
PROFILED_ROUNDS = 10
_MODULES = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # a config.json's numbers of modules for drafting
PIPELINE = 4  # a request's first results, which come while steps with prompts are still under way


@dataclasses.dataclass(frozen=True)
class Setting:
    prompt_tokens: int = 512
    output_tokens: int = 256
    acceptance_length: float = 3.0
    repeats: int = 2


def floor_ms(
    folder: Path, name: str, shape: str, batch: int, setting: Setting, tensor_parallel: int, copy_rate: float
) -> float:
    """Milliseconds that copying the bytes takes which a round must read on each GPU, at `copy_rate` bytes/s: weights
    once per pass, and the KV of half-grown answers. Embeddings and activations are left out. folder: that
    `write_checkpoints` wrote to."""
    tokens = batch * (setting.prompt_tokens + setting.output_tokens / 2)
    tree = SHAPES[shape]
    if name in configured.CONFIGS:
        steps, top_k, width = tree or (0, 1, 1)
        read = configured.floor_bytes(folder, name, batch, width, tokens, steps, batch * top_k, tensor_parallel)
        return read / copy_rate * 1e3
    size = MODELS[name]
    attention = size.hidden * (size.heads + 2 * size.kv_heads) * size.head_dim
    rest = size.heads * size.head_dim * size.hidden + 3 * size.hidden * size.mlp
    kv = tokens * 2 * size.kv_heads * size.head_dim  # of a layer
    numbers = size.layers * (attention + rest + kv) + size.vocab * size.hidden
    if tree is not None:
        one_pass = 2 * attention + rest + size.draft_vocab * size.hidden + kv
        numbers += 3 * size.hidden * size.hidden + tree[0] * one_pass
    return 2 * numbers / tensor_parallel / copy_rate * 1e3


def write_checkpoints(folder: Path, name: str, max_position: int = 8192, block_draft: str = "dflash") -> None:
    """config.json of a target and an EAGLE-3 head of these dimensions, or of a target with its own module for drafting;
    the weights are dummies. max_position: of models in `MODELS`; others have their own. block_draft: of
    `tests.bench.models.published.BLOCK_DRAFTS`."""
    if name in configured.CONFIGS:
        configured.write_config(folder, name, block_draft)
        return
    write_config(folder, MODELS[name], max_position)


def drafted_by(folder: Path) -> tuple[str, Method]:
    """Path and method of the draft that `write_checkpoints` wrote: a head, or the target's own module."""
    head = folder / "draft"
    return (str(head), cast(Method, method_of(read_config_json(str(head))))) if head.exists() else ("", "mtp")


def has_draft(folder: Path) -> bool:
    """Whether `write_checkpoints` wrote a head, or a target with its own module for drafting."""
    config = read_config_json(str(folder / "target"))
    return (folder / "draft").exists() or any(config.get(name) for name in _MODULES)


def keep_layers(folder: Path, count: int) -> None:
    """Change what `write_checkpoints` wrote: the target keeps its first `count` layers, at least four, and a head reads
    only these."""
    for path in (folder / "target" / "config.json", folder / "draft" / "config.json"):
        if not path.exists():
            continue
        config = json.loads(path.read_text())
        own = config.get("text_config", config)
        if path.parent.name == "target":
            assert own["num_hidden_layers"] >= count
            own["num_hidden_layers"] = count
            if "layer_types" in own:
                own["layer_types"] = own["layer_types"][:count]
        elif "dflash_config" in own:
            block = own["dflash_config"]
            block["target_layer_ids"] = list(range(count - 1))[-len(block["target_layer_ids"]) :]
            config["num_target_layers"] = count
        else:
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(range(count - 3, count))}
        path.write_text(json.dumps(config))


QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "fp8": {  # scales of 128 x 128 blocks; not a hybrid's gates
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["in_proj_a", "in_proj_b"],
    },
    "w4a16": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*in_proj_[ab]$"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 128,
                    "dynamic": False,
                },
            }
        },
    },
}


def quantize_config(path: Path, name: str) -> None:
    """The config.json at `path` gets a quantization_config."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": QUANTIZATIONS[name]}))


def page_size_of(target: Path) -> int:
    """As its model is served: `deploy/deepseek-v3.yaml` for latent rows, of which a tile is a page."""
    return 64 if "kv_lora_rank" in json.loads((target / "config.json").read_text()) else CacheConfig().page_size


def engine_spec(
    folder: Path,
    shape: str,
    batch: int,
    setting: Setting,
    tensor_parallel: int,
    cuda_graphs: bool,
    attention: str = "auto",
    implementation: Implementation = "auto",
) -> EngineSpec:
    """An engine for `batch` requests of one shape. attention: the backend of every phase of target and draft.
    implementation: see `ModelSource`."""
    tree = SHAPES[shape]
    ahead = 64 if tree is None else 64 + 2 * tree[2]  # positions that rounds in flight may write
    tokens_per_request = setting.prompt_tokens + setting.output_tokens + ahead
    page_size = page_size_of(folder / "target")
    pages = batch * -(-tokens_per_request // page_size) + 8
    worker = WorkerConfig(
        ModelSource(
            path=str(folder / "target"),
            load_format="dummy",
            max_model_len=max(2048, tokens_per_request),
            implementation=implementation,
        ),
        CacheConfig(page_size, num_pages=pages, prefix_cache=False),
        # all prompts first: else the first requests are far ahead when the last join them
        SchedulerConfig(max_running=batch, max_step_tokens=8192, itl_target_ms=1e6),
        tensor_parallel=tensor_parallel,
        cuda_graphs=cuda_graphs,
        attention=TargetAttention(attention, attention),
    )
    if tree is None:
        return EngineSpec(worker)
    num_steps, top_k, width = tree
    return EngineSpec(
        worker,
        SpeculativeConfig(
            *drafted_by(folder),
            num_steps,
            top_k,
            width,
            adaptive=False,
            synthetic_acceptance_length=setting.acceptance_length,
        ),
        DraftAttention(attention, attention, attention),
    )


@dataclasses.dataclass(frozen=True, order=True)
class Run:
    """A whole batch. full_ms: median time between two results while every request ran, prompts behind them."""

    seconds: float
    steps: int
    full_ms: float


def timed(
    engine: LocalEngine, prompts: Sequence[list[int]], sampling: SamplingParams | Sequence[SamplingParams]
) -> Run:
    """Run all prompts as one batch. sampling: of all, or of each."""
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    requests = [Request(f"r{i}", *pair) for i, pair in enumerate(zip(prompts, each, strict=True))]
    stamps: list[float] = []  # of the last request's tokens, until the first request ends
    ended = 0

    def listen(output: RequestOutput) -> None:
        nonlocal ended
        ended += output.finish_reason is not None
        if output.request is requests[-1] and not ended:
            stamps.append(time.perf_counter())

    steps = engine.scheduler.stats.num_steps
    started_s = time.perf_counter()
    engine.run(requests, len(requests), listen)
    seconds = time.perf_counter() - started_s
    gaps = [later - sooner for sooner, later in itertools.pairwise(stamps[PIPELINE:])]
    return Run(seconds, engine.scheduler.stats.num_steps - steps, statistics.median(gaps) * 1e3 if gaps else 0.0)


def measure(spec: EngineSpec, batch: int, setting: Setting) -> dict[str, float]:
    """Figures of one shape and batch."""
    prompts = random_prompts(spec.worker.model, batch, setting.prompt_tokens)
    started_s = time.perf_counter()
    with local_engine(spec) as engine:
        ready_s = time.perf_counter() - started_s
        short, whole = SamplingParams(1, 0.0), SamplingParams(setting.output_tokens, 0.0)
        timed(engine, prompts, SamplingParams(16, 0.0))
        prefill = min(timed(engine, prompts, short) for _ in range(setting.repeats + 1))
        best = min(timed(engine, prompts, whole) for _ in range(setting.repeats))
        seen = {}
        if torch.cuda.is_available() and spec.worker.tensor_parallel == 1:
            start(engine, prompts, setting.output_tokens)
            events = profile(engine, PROFILED_ROUNDS)
            if device_events(events):  # few output tokens leave no steady rounds
                seen = figures(events, PROFILED_ROUNDS)
    rounds, decoding_s = best.steps - prefill.steps, best.seconds - prefill.seconds
    tokens_per_s = batch * (setting.output_tokens - 1) / decoding_s
    return {
        "ms_per_round": decoding_s / rounds * 1e3,
        "full_ms": best.full_ms,
        "requests_per_s": batch / best.seconds,
        "rounds": rounds,
        "tokens_per_s": tokens_per_s,
        "prefill_s": prefill.seconds,
        "ready_s": ready_s,
        **{name: seen[name] for name in ("graph_launches", "copies_to_host", "idle_share", "kernels") if seen},
    }


def add_engine_options(
    parser: argparse.ArgumentParser, shapes: list[str], batches: list[int], others: Iterable[str] = ()
) -> None:
    """Which engines are measured; shapes and batches: unless others are given. others: models beside `MODELS`."""
    parser.add_argument("--model", choices=sorted((*MODELS, *others)), default="llama-3.1-8b")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=shapes)
    parser.add_argument("--batches", nargs="+", type=int, default=batches)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few tokens: a trial on any machine")


def model_of(arguments: argparse.Namespace) -> str:
    """The name of the model whose dimensions the engines have."""
    return "tiny" if arguments.tiny else str(arguments.model)


def print_tables(results: dict[str, dict[str, dict[str, float]]], batches: list[int]) -> None:
    """A row for each shape, a column for each batch."""
    for title, name in (("ms per round", "ms_per_round"), ("floor, ms", "floor_ms"), ("tokens/s", "tokens_per_s")):
        rows = [(shape, *(f"{row[str(batch)][name]:.4g}" for batch in batches)) for shape, row in results.items()]
        print(*table([f"{title} at batch", *map(str, batches)], rows), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, ["plain", "chain", "tree"], [1, 8, 32, 64, 128], configured.CONFIGS)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument(
        "--quantization", choices=("none", *QUANTIZATIONS), default="none", help="of the target; floors are bf16's"
    )
    parser.add_argument("--no-graphs", action="store_true", help="run rounds eagerly, to see what graphs bring")
    parser.add_argument(
        "--model-impl", choices=("auto", "transformers"), default="auto", help="transformers: through the adapter"
    )
    parser.add_argument("--block-draft", choices=BLOCK_DRAFTS, default="dflash", help="kind of head of block shapes")
    parser.add_argument("--attention", default="auto", help="the attention backend of every phase of target and draft")
    parser.add_argument("--prompt-tokens", type=int, default=Setting.prompt_tokens)
    parser.add_argument("--output-tokens", type=int, default=Setting.output_tokens)
    parser.add_argument("--acceptance", type=float, default=Setting.acceptance_length, help="tokens of a round, mean")
    parser.add_argument("--repeats", type=int, default=Setting.repeats, help="the best of how many runs is taken")
    arguments = parser.parse_args()
    setting = Setting(arguments.prompt_tokens, arguments.output_tokens, arguments.acceptance, arguments.repeats)
    if arguments.tiny:
        setting = Setting(40, 24)
    results: dict[str, dict[str, dict[str, float]]] = {}
    copy_rate = copy_bytes_per_s(1 << 24 if arguments.tiny else 1 << 30)
    print(f"{hardware()} copies {copy_rate / 1e12:.3g} TB/s, read and written bytes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(arguments)
        write_checkpoints(Path(folder), model, block_draft=arguments.block_draft)
        if arguments.quantization != "none":
            quantize_config(Path(folder) / "target" / "config.json", arguments.quantization)
        for shape in arguments.shapes:
            for batch in arguments.batches:
                spec = engine_spec(
                    Path(folder),
                    shape,
                    batch,
                    setting,
                    arguments.tensor_parallel,
                    not arguments.no_graphs,
                    arguments.attention,
                    arguments.model_impl,
                )
                results.setdefault(shape, {})[str(batch)] = measure(spec, batch, setting) | {
                    "floor_ms": floor_ms(
                        Path(folder), model, shape, batch, setting, arguments.tensor_parallel, copy_rate
                    )
                }
                print(shape, batch, {k: round(v, 3) for k, v in results[shape][str(batch)].items()}, flush=True)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
    print_tables(results, arguments.batches)
    print(
        json.dumps(
            {
                "bench": "round",
                "hardware": hardware(),
                "commit": commit(),
                "model": arguments.model,
                "quantization": arguments.quantization,
                "block_draft": arguments.block_draft,
                "copy_tb_per_s": round(copy_rate / 1e12, 4),
                "tensor_parallel": arguments.tensor_parallel,
                "attention": arguments.attention,
                "implementation": arguments.model_impl,
                "prompt_tokens": setting.prompt_tokens,
                "output_tokens": setting.output_tokens,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
