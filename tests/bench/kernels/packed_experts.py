"""The experts of one layer with weights of few bits on a GPU.

    python -m tests.bench packed_experts [--model gpt-oss-20b] [--rows 1 4 16 32 64 512]

Microseconds per layer of routing and both products (logits given). A CUDA graph holds several passes, each with logits
of its own over one of three layers, so that the L2 cache is cold. Beside it the bytes of the experts that some row goes
to, the time in which a copy reads as many (floor), and the share of the copy's rate. One JSON line last.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence

import torch

from aerie.kernels.experts.gated import GPT_OSS, SWIGLU, GatedActivation
from aerie.kernels.experts.route import RouterLogits, Routing
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace
from aerie.kernels.packed.expert_tiles import packed_expert_workspace
from aerie.kernels.packed.experts import PackedExpertWeights, packed_expert_products, with_raised_scales
from aerie.kernels.packed.weight import Code, PackedWeight, empty
from tests.bench.kernels.gpu_time import Clock, captured, hardware
from tests.bench.machine import commit

ROWS = (1, 4, 8, 16, 32, 64, 512, 4096)
_PASSES, _LAYERS = 9, 3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclasses.dataclass(frozen=True)
class Model:
    """size: of a layer's rows. width: of an expert on the rank. group: inputs that share a scale."""

    size: int
    width: int
    routing: Routing
    code: Code
    group: int
    activation: GatedActivation = SWIGLU
    biased: bool = False


MODELS = {
    "gpt-oss-20b": Model(2880, 2880, Routing(32, 4, normalise=True), "e2m1", 32, GPT_OSS, True),
    "qwen3.5-35b-a3b-nvfp4": Model(2048, 512, Routing(256, 8, normalise=True), "e2m1", 16),
    "qwen3.5-35b-a3b-int4": Model(2048, 512, Routing(256, 8, normalise=True), "int4", 128),
    "dsv3-rank-nvfp4": Model(7168, 256, Routing(256, 8, "sigmoid", 8, 4, 2, True, True, 2.5), "e2m1", 16),
}


def layer(model: Model) -> PackedExpertWeights:
    """Random codes; scales of which results are as large as inputs."""
    num = model.routing.num_experts

    def matrix(n: int, k: int) -> PackedWeight:
        one = empty(n, k, model.group, model.code, DEVICE, torch.bfloat16, False, model.group == 16, num)
        one.codes.random_(-(1 << 31), (1 << 31) - 1)
        one.scales.fill_(0.3 * k**-0.5)
        if one.row_scale is not None:
            one.row_scale.fill_(1.0)
        return one

    biases = (
        [torch.zeros(num, n, device=DEVICE) for n in (2 * model.width, model.size)] if model.biased else [None, None]
    )
    gate_up, down = matrix(2 * model.width, model.size), matrix(model.size, model.width)
    return PackedExpertWeights(gate_up, down, *biases, activation=model.activation)


def measure(clock: Clock, model: Model, all_rows: Sequence[int]) -> list[dict[str, object]]:
    layers = [with_raised_scales(layer(model)) if DEVICE.type == "cuda" else layer(model) for _ in range(_LAYERS)]
    sizes, routing = layers[0].sizes(model.routing.experts_per_token), model.routing
    options = GEMMOptions(Workspace.allocate(*packed_expert_workspace(sizes), DEVICE))
    expert_bytes = (layers[0].gate_up.num_bytes + layers[0].down.num_bytes) / routing.num_experts
    bias = torch.zeros(routing.num_experts, device=DEVICE) if routing.has_bias else None
    results: list[dict[str, object]] = []
    print("rows | experts us | distinct experts | MB | floor us | TB/s | share of a copy", flush=True)
    for rows in all_rows:
        x = torch.randn(rows, model.size, device=DEVICE).bfloat16()
        logits = [torch.randn(rows, routing.num_experts, device=DEVICE) for _ in range(_PASSES)]
        routers = [RouterLogits(each, bias, routing) for each in logits]

        def passes(x: torch.Tensor = x, routers: list[RouterLogits] = routers) -> None:
            for i, router in enumerate(routers):
                packed_expert_products(x, router, layers[i % _LAYERS], options)

        (total,), rate = clock.medians(captured(passes).replay)
        us = total / _PASSES
        distinct = sum(int(router.choose()[0].unique().numel()) for router in routers) / _PASSES
        num_bytes = expert_bytes * distinct
        found: dict[str, object] = {
            "rows": rows,
            "experts_us": round(us, 2),
            "distinct": round(distinct, 1),
            "mb": round(num_bytes / 1e6, 1),
            "floor_us": round(num_bytes / rate * 1e6, 2),
            "tbs": round(num_bytes / us / 1e6, 3),
            "share": round(num_bytes / us * 1e6 / rate, 3),
        }
        results.append(found)
        print(" | ".join(str(value) for value in found.values()), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt-oss-20b")
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    results = measure(Clock(args.rounds), MODELS[args.model], args.rows)
    whole = {"bench": "packed_experts", "hardware": hardware(), "commit": commit(), "model": args.model}
    print(json.dumps(whole | {"results": results}))


if __name__ == "__main__":
    main()
