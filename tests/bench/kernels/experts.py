"""The experts of one layer on a GPU.

    python -m tests.bench experts [--model dsv3-rank] [--rows 1 4 8 32 64 256 512 2048 8192]

Microseconds per layer: of routing alone (logits given), of routing and both products ("experts"), and of all that a
layer of experts does with rows of 16 bits ("layer": router, rounding to FP8, routing, products). A CUDA graph holds a
pass of several layers with weights and logits of their own, so that the L2 cache is cold for each. Beside it the bytes
of the experts that some row goes to, as a share of the bandwidth of a copy measured in the same turns. Rows choose
evenly. One JSON line last.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aerie.kernels.experts.few_rows_triton import few_row_experts
from aerie.kernels.experts.many_rows_triton import many_row_experts, many_row_tiles
from aerie.kernels.experts.route import Routed, RouterLogits, Routing
from aerie.kernels.experts.route_triton import route
from aerie.kernels.experts.router_gemm_triton import router_gemm
from aerie.kernels.experts.weights import (
    FP8,
    MAX_FEW_ROWS,
    ExpertWeights,
    few_row_tiles,
    partial_sizes,
)
from aerie.kernels.fp8.rows_triton import quantize_rows
from aerie.kernels.gemm.workspace import Workspace
from tests.bench.kernels.gpu_time import Clock, captured, hardware
from tests.bench.machine import commit

ROWS = (1, 4, 8, 32, 64, 256, 512, 2048, 8192)


@dataclasses.dataclass(frozen=True)
class Model:
    """size: of a layer's rows. width: of an expert on the rank. fp8: weights with scales of blocks; else bfloat16."""

    size: int
    width: int
    routing: Routing
    num_shared: int
    fp8: bool

    @property
    def slots(self) -> int:
        return self.routing.experts_per_token + self.num_shared

    @property
    def expert_bytes(self) -> int:
        return 3 * self.size * self.width * (1 if self.fp8 else 2)


MODELS = {
    "dsv3-rank": Model(7168, 256, Routing(256, 8, "sigmoid", 8, 4, 2, True, True, 2.5), 1, True),
    "qwen3-30b-a3b": Model(2048, 768, Routing(128, 8, normalise=True), 0, False),
}


class Layer:
    """Weights of one layer, and the tensors of a pass that differ between layers."""

    def __init__(self, model: Model, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        num = model.routing.num_experts + model.num_shared
        self.weights = ExpertWeights(
            *(self._random(num, *shape, model, generator) for shape in self._shapes(model)),
            *(self._scales(num, *shape, model) for shape in self._shapes(model)),
            num_shared=model.num_shared,
        )
        router = torch.randn(model.routing.num_experts, model.size, device="cuda", generator=generator)
        self.router = (router / model.size**0.5).bfloat16()
        bias = torch.zeros(model.routing.num_experts, device="cuda")
        self.bias = bias if model.routing.has_bias else None
        self.generator, self.model = generator, model

    @staticmethod
    def _shapes(model: Model) -> tuple[tuple[int, int], tuple[int, int]]:
        return (2 * model.width, model.size), (model.size, model.width)

    @staticmethod
    def _random(num: int, rows: int, columns: int, model: Model, generator: torch.Generator) -> Tensor:
        dtype = FP8 if model.fp8 else torch.bfloat16
        weights = torch.empty(num, rows, columns, dtype=dtype, device="cuda")
        for expert in weights:  # one expert's numbers at a time are as large as two in bfloat16
            values = torch.randn(rows, columns, device="cuda", generator=generator)
            expert.copy_(values * 32 if model.fp8 else values / columns**0.5)
        return weights

    @staticmethod
    def _scales(num: int, rows: int, columns: int, model: Model) -> Tensor | None:
        if not model.fp8:
            return None
        return torch.full((num, rows // 64, columns // 128), columns**-0.5 / 32, device="cuda")

    def logits(self, rows: int) -> Tensor:
        return torch.randn(rows, self.model.routing.num_experts, device="cuda", generator=self.generator)


class Pass:
    """One number of rows through all layers."""

    def __init__(self, layers: Sequence[Layer], rows: int) -> None:
        self.layers, self.rows, self.model = layers, rows, layers[0].model
        sizes = layers[0].weights.sizes(self.model.slots)
        self.tiles = few_row_tiles(rows, sizes) if rows <= MAX_FEW_ROWS else many_row_tiles(rows, sizes)
        self.x = torch.randn(rows, self.model.size, device="cuda").bfloat16()
        self.inputs = quantize_rows(self.x, by_group=True) if self.model.fp8 else self.x
        self.out = torch.empty_like(self.x)
        self.all_logits = [layer.logits(rows) for layer in layers]
        needs = [(0, layers[0].weights.num_experts)]
        if rows <= MAX_FEW_ROWS:
            needs.append(partial_sizes(rows, sizes, self.tiles))
        cells, tickets = (max(each) for each in zip(*needs, strict=True))
        self.workspace = Workspace.allocate(cells, tickets, torch.device("cuda"))
        self.other_tickets = torch.zeros_like(self.workspace.tickets)

    def _route(self, layer: Layer, logits: Tensor, tickets: Tensor | None = None) -> Routed:
        """tickets: None unless no experts follow, since these set the workspace's to zero again."""
        router = RouterLogits(logits, layer.bias, self.model.routing)
        return route(router, self.model.num_shared, self.workspace.tickets if tickets is None else tickets)

    def _multiply(self, layer: Layer, routed: Routed, inputs: object) -> None:
        if self.rows <= MAX_FEW_ROWS:
            few_row_experts(inputs, routed, layer.weights, self.workspace, self.tiles, self.out)  # type: ignore[arg-type]
        else:
            many_row_experts(inputs, routed, layer.weights, self.tiles, self.out)  # type: ignore[arg-type]

    def routing(self) -> None:
        for layer, logits in zip(self.layers, self.all_logits, strict=True):
            self._route(layer, logits, self.other_tickets)

    def experts(self) -> None:
        for layer, logits in zip(self.layers, self.all_logits, strict=True):
            self._multiply(layer, self._route(layer, logits), self.inputs)

    def layer(self) -> None:
        for layer in self.layers:
            logits = router_gemm(self.x, layer.router, None, self.workspace, deterministic=False)
            inputs = quantize_rows(self.x, by_group=True) if self.model.fp8 else self.x
            self._multiply(layer, self._route(layer, logits), inputs)

    def distinct(self) -> float:
        """Experts that some row goes to, in the mean of the layers."""
        chosen = (
            self._route(layer, logits, torch.zeros_like(self.other_tickets)).chosen
            for layer, logits in zip(self.layers, self.all_logits, strict=True)
        )
        return sum(int(one.unique().numel()) for one in chosen) / len(self.layers)


def measure(clock: Clock, model: Model, layers: Sequence[Layer], all_rows: Sequence[int]) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    print("rows | route us | experts us | layer us | distinct experts | MB | TB/s | share of a copy", flush=True)
    for rows in all_rows:
        one = Pass(layers, rows)
        runs: list[Callable[[], None]] = [one.routing, one.experts, one.layer]
        times, rate = clock.medians(*(captured(run).replay for run in runs))
        routing, experts, layer = (time / len(layers) for time in times)
        distinct = one.distinct()
        num_bytes = model.expert_bytes * distinct
        found: dict[str, object] = {
            "rows": rows,
            "route_us": round(routing, 2),
            "experts_us": round(experts, 2),
            "layer_us": round(layer, 2),
            "distinct": round(distinct, 1),
            "mb": round(num_bytes / 1e6, 1),
            "tbs": round(num_bytes / experts / 1e6, 3),
            "share": round(num_bytes / experts * 1e6 / rate, 3),
        }
        results.append(found)
        print(" | ".join(str(value) for value in found.values()), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="dsv3-rank")
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    model, clock = MODELS[args.model], Clock(args.rounds)
    layers = [Layer(model, seed) for seed in range(args.layers)]
    results = measure(clock, model, layers, args.rows)
    whole = {"bench": "experts", "hardware": hardware(), "commit": commit(), "model": args.model}
    print(json.dumps(whole | {"results": results}))


if __name__ == "__main__":
    main()
