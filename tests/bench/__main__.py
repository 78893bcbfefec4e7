"""The benchmarks' entry point.

    python -m tests.bench                    # the list
    python -m tests.bench NAME [options]     # one of them; --help says which options it has
    python -m tests.bench cpu [--only embedded coordinator http memory startup] [--quick]     # `make bench`

`cpu` measures on this machine what Aerie promises of a CPU: tables, then one JSON line. It exits 0 whether the
requirements are met or not. A part that crashes is an error.
"""

import argparse
import importlib
import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

from aerie.deploy.bench.figures import table
from tests.bench.host.finding import Report
from tests.bench.machine import BUSY_CORES, busy_cores, machine

# Name -> module, and what it measures.
BENCHES = {
    "round": ("round", "ms per round by batch and tree shape, beside the floor by bytes (GPU)"),
    "sampling": ("sampling", "ms per round by kind of sampling (GPU)"),
    "grammar": ("grammar", "ms per round under grammars, and what drafts gain that follow them (GPU)"),
    "adaptive": ("shapes.adaptive", "adaptive tree shapes against each static one, dummy weights (GPU)"),
    "adaptive_pair": ("shapes.adaptive_pair", "the same on the embedded pair, whose acceptance is real"),
    "adapter_rounds": ("shapes.adapter_rounds", "ms per round of requests with LoRA adapters (GPU)"),
    "rollouts": ("shapes.rollouts", "a batch with few long answers, with and without a draft (GPU)"),
    "draft_adapters": ("quality.draft_adapters", "acceptance of a trained adapter without and with one of its draft"),
    "profile_round": ("profile_round", "kernels, launches, copies and idle time of a round (GPU)"),
    "open_loop": ("open_loop", "TTFT, ITL, TPOT over HTTP under Poisson arrivals, plain or prompt-heavy"),
    "tenants": ("host.tenants", "first tokens of one key while another floods the server"),
    "first_token": ("tracing.first_token", "every leg of first tokens under arrivals; steps, predicted and measured"),
    "laptop": ("host.laptop", "a small model on a CPU: Aerie, transformers and llama.cpp; its answers to questions"),
    "weight_updates": ("host.weight_updates", "ms that steps wait for new weights (GPU; --gpus 2: NCCL)"),
    "learning": ("host.learning", "a served draft that learns: tokens a round by minute, and gaps beside it (CPU)"),
    "startup": ("host.startup", "a start of `aerie serve`, kernels, graphs, a restart (GPU with --gpu)"),
    "memory_growth": ("host.memory_growth", "memory while thousands of requests are answered (CPU)"),
    "replicas": ("replicas", "the choice between several engines of one machine"),
    "gsm8k": ("quality.gsm8k", "accuracy, acceptance length and equal answers of a running server"),
    "saved_states": ("quality.saved_states", "what saved states of bfloat16 cost in text (CPU)"),
    "hybrid_acceptance": (
        "quality.hybrid_acceptance",
        "tokens a round of the embedded hybrid, by shape and head (CPU)",
    ),
    "fewer_bits": ("quality.fewer_bits", "loss and acceptance of the small models quantised by `aerie quantize` (CPU)"),
    "copied_drafts": ("quality.copied_drafts", "accepted tokens a round of drafts copied from the text (CPU)"),
    "draft_methods": ("quality.draft_methods", "every kind of draft of the small models, by kind of text (CPU)"),
    "image_drafts": ("quality.image_drafts", "drafts by the embedding of pictures that they get (CPU)"),
    "draft_figures": ("quality.draft_figures", "tables and figures of what draft_methods printed"),
    "real_heads": ("quality.real_heads", "heads for a published model: trained, their trees, tokens a second (GPU)"),
    "attention": ("kernels.attention", "attention over K/V heads, by backend, mode and shape (GPU)"),
    "latent_attention": ("kernels.latent_attention", "attention over latent rows (GPU)"),
    "fp8_kv": ("kernels.fp8_kv", "attention over FP8 pages against bfloat16 (GPU)"),
    "delta_rule": ("kernels.delta_rule", "recurrent layers of the gated delta rule: rounds and chunks (GPU)"),
    "delta_chunks": ("kernels.delta_chunks", "their prompt chunks by kernel and tiles; equal runs, and errors (GPU)"),
    "experts": ("kernels.experts", "routing and products of a layer of experts (GPU)"),
    "packed": ("kernels.packed", "products of 1 to 64 rows with 4-bit weights, by tiles (GPU)"),
    "packed_experts": ("kernels.packed_experts", "experts with weights of 4 and 8 bits (GPU)"),
    "exact_cost": ("quality.exact_cost", "ms per round and prompt of `deterministic: true` beside the free mode (GPU)"),
    "exact_engine": ("quality.exact_engine", "answers that differ from those alone, free and deterministic (GPU)"),
    "tree_growth": ("kernels.tree_growth", "growth of a block's tree (GPU)"),
    "images": ("models.images", "vision towers, first tokens of pictures, gaps of other requests (GPU)"),
    "lora": ("kernels.lora", "what adapters add to the linear layers of a layer (GPU)"),
    "linear": ("kernels.linear", "linear layers, bf16 and FP8 (GPU)"),
    "all_reduce": ("kernels.all_reduce", "sums between GPUs by message size (2 or 4 GPUs)"),
    "results": ("results", "writes the tables of tests/bench/RESULTS.md from results.jsonl"),
}
# Part of `cpu` -> module with `run(quick) -> Report`; imported when its turn comes.
PARTS = {
    "startup": "tests.bench.host.startup",
    "memory": "tests.bench.host.memory",
    "embedded": "tests.bench.embedded",
    "coordinator": "tests.bench.host.coordinator",
    "http": "tests.bench.host.http_path",
}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that `argv` names; 0, or its exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        rows = [("cpu", "what a CPU can show, with what was promised"), *((n, b[1]) for n, b in BENCHES.items())]
        print(*table(["NAME", "measures"], rows), sep="\n")
        return 0
    name, *options = argv
    if name == "cpu":
        return cpu(options)
    if name not in BENCHES:
        print(f"{name}: no such benchmark; there are cpu, {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    sys.argv = [f"tests.bench {name}", *options]
    return int(importlib.import_module(f"tests.bench.{BENCHES[name][0]}").main() or 0)


def cpu(options: Sequence[str]) -> int:
    """All parts, or those that the options name."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench cpu")
    parser.add_argument(
        "--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument("--quick", action="store_true", help="a trial of each part; its figures mean nothing")
    arguments = parser.parse_args(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a part ends the server that it has started
    print(json.dumps(measure(arguments.only, arguments.quick)))
    return 0


def measure(parts: list[str], quick: bool) -> dict[str, Any]:
    """Run `parts` in turn; return what the JSON line holds: "machine", "details" and every finding by its name."""
    where = machine()
    print(", ".join(f"{key} {value}" for key, value in where.items()), flush=True)
    reports: dict[str, Report] = {}
    busy_before: dict[str, float] = {}
    for part in parts:
        busy = busy_before[part] = round(busy_cores(), 2)
        if busy > BUSY_CORES:
            print(f"warning: others use {busy:.2f} cores; `{part}` would do better on an idle machine", flush=True)
        report = reports[part] = importlib.import_module(PARTS[part]).run(quick)
        print(f"\n## {part}\n", *report.lines, sep="\n", flush=True)
    findings = {name: finding for report in reports.values() for name, finding in report.findings.items()}
    print(
        "\n## requirements\n",
        *table(
            ["figure", "measured", "unit", "required", "met"],
            [(name, f.value, f.unit, f.rule, "yes" if f.met else "NO") for name, f in findings.items()],
        ),
        sep="\n",
    )
    return {
        "bench": "cpu",
        "quick": quick,
        "machine": where | {"busy_cores_before": busy_before},
        **{name: finding.as_json() for name, finding in findings.items()},
        "details": {part: report.details for part, report in reports.items()},
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
