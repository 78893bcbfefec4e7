"""What adapters add to the linear layers of a decoder layer on a GPU: Llama-3.1-8B's four matrices, bfloat16.

    python -m tests.bench lora [--rows 1 8 32 64 256 2048] [--ranks 16 64] [--adapters 1 4 32]

Microseconds of a layer by CUDA graph: the four products alone, gate and up with SwiGLU, and with the adapters of
--adapters requests, each with an equal share of the rows. "none": the kernels run, and no row has an adapter.
"""

import argparse
import json
from collections.abc import Callable

import torch
from torch import Tensor

from aerie.deploy.bench.figures import table
from aerie.kernels.gemm.choice import choose_gemm
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace
from aerie.kernels.lora.product import LoraTables, RowAdapters, add_lora
from aerie.kernels.norm.norm import silu_mul
from tests.bench.kernels.gpu_time import Clock, captured, hardware
from tests.bench.machine import commit

NUM_LAYERS = 4  # of one graph
LAYER = (  # inputs, and borders of the stacked matrices' outputs
    (4096, (0, 4096, 5120, 6144)),
    (4096, (0, 4096)),
    (4096, (0, 14336, 28672)),
    (14336, (0, 4096)),
)


def tables_of(rank: int, max_loras: int, device: torch.device) -> list[LoraTables]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device) * 0.01

    return [
        LoraTables(random(max_loras, (len(parts) - 1) * rank, inputs), random(max_loras, parts[-1], rank), parts)
        for inputs, parts in LAYER
    ]


def lora_indices(rows: int, adapters: int, device: torch.device) -> Tensor:
    """Return each row's index in the tables: `adapters` runs of equal length; all -1 for 0."""
    if not adapters:
        return torch.full((rows,), -1, dtype=torch.int32, device=device)
    return (torch.arange(rows, device=device) * adapters // rows).int()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 64, 256, 2048])
    parser.add_argument("--ranks", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--adapters", type=int, nargs="*", default=[0, 1, 4, 32])
    arguments = parser.parse_args()
    device, clock, found = torch.device("cuda"), Clock(9), []
    weights = [torch.randn(parts[-1], inputs, dtype=torch.bfloat16, device=device) * 0.01 for inputs, parts in LAYER]
    options = GEMMOptions(Workspace.create([(each.shape[0], each.shape[1]) for each in weights], device))
    gemms = [choose_gemm(each, options) for each in weights]
    tables = {rank: tables_of(rank, max(1, *arguments.adapters), device) for rank in arguments.ranks}
    for rows in arguments.rows:
        inputs = {k: torch.randn(rows, k, dtype=torch.bfloat16, device=device) for k, _ in LAYER}

        def run(rank: int, indices: Tensor | None, inputs: dict[int, Tensor] = inputs) -> Callable[[], None]:
            counters = torch.zeros(NUM_LAYERS * len(LAYER), 4, dtype=torch.int32, device=device)

            def layer(number: int) -> None:
                for i, (k, parts) in enumerate(LAYER):
                    x, gated = inputs[k], len(parts) == 3
                    if indices is None:
                        gemms[i].multiply_gated(x) if gated else gemms[i].multiply(x, None, None)
                        continue
                    adapters = RowAdapters(tables[rank][i], indices, counters[number * len(LAYER) + i])
                    if gemms[i].multiply_adapted(x, None, None, adapters, gated) is None:
                        y = add_lora(gemms[i].multiply(x, None, None), x, adapters.tables, indices)
                        y = silu_mul(y) if gated else y

            def layers() -> None:
                counters.zero_()
                for number in range(NUM_LAYERS):
                    layer(number)

            return layers

        cases = [(rank, n) for rank in arguments.ranks for n in arguments.adapters if n <= rows]
        runs = [run(0, None), *(run(rank, lora_indices(rows, n, device)) for rank, n in cases)]
        times, _ = clock.medians(*(captured(each).replay for each in runs))
        alone = times[0] / NUM_LAYERS
        for (rank, n), us in zip(cases, [each / NUM_LAYERS for each in times[1:]], strict=True):
            row = (rows, rank, n or "none", round(alone, 1), round(us, 1), round(us - alone, 1))
            found.append(row)
            print(*row, flush=True)
    print(*table(["rows", "rank", "adapters", "products, us", "with adapters, us", "added, us"], found), sep="\n")
    print(json.dumps({"bench": "lora", "hardware": hardware(), "commit": commit(), "rows": found}))


if __name__ == "__main__":
    main()
