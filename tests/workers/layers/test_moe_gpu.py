"""Experts on a GPU: the grouped products of a captured step, whoever is chosen when it is replayed."""

import pytest
import torch

from aerie.kernels.experts.grouped import experts_one_by_one, grouped_experts
from aerie.kernels.experts.route import Routing, route

pytestmark = pytest.mark.gpu

V3 = Routing(16, 4, "sigmoid", 4, 2, 2, has_bias=True, normalise=True, scale=2.5)


@pytest.mark.parametrize("rows", [1, 4, 33, 256])
def test_a_replayed_graph_goes_to_the_experts_that_are_chosen_then(rows: int) -> None:
    torch.manual_seed(0)
    gpu = torch.device("cuda")
    gate_up = torch.randn(16, 2 * 64, 128, device=gpu, dtype=torch.bfloat16) / 128**0.5
    down = torch.randn(16, 128, 64, device=gpu, dtype=torch.bfloat16) / 64**0.5
    x = torch.zeros(rows, 128, device=gpu, dtype=torch.bfloat16)
    logits, bias = torch.zeros(rows, 16, device=gpu), torch.randn(16, device=gpu)

    def step() -> torch.Tensor:
        return grouped_experts(x, *route(logits, bias, V3), gate_up, down)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(3):
        x.normal_()
        logits.normal_()
        graph.replay()
        expected = experts_one_by_one(x.float(), *route(logits, bias, V3), gate_up.float(), down.float())
        # bfloat16 has 8 bits of mantissa, rounded to after each product; values are about 1
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
