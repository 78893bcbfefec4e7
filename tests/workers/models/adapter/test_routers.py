"""Routers of transformers that Aerie's replace, so that experts run as in an own class. Which ones match is decided by
results; answers of whole models are compared in `test_every_decoder`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aerie.kernels.experts.route import RouterLogits, Routing
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.workers.layers.experts_method import UnquantizedExperts
from aerie.workers.models.adapter.routers import (
    MatchedRouter,
    RouterChosenExperts,
    RouterMatch,
    find_router,
    match_router,
)
from aerie.workers.models.adapter.survey import make_model
from tests.support.known_models import known_config, make_known
from tests.support.slow import slow
from tests.workers.models.adapter.test_fused import made
from tests.workers.models.test_targets import check_greedy

GROUPED: dict[str, Any] = {"n_routed_experts": 8, "num_local_experts": 8, "num_experts": 8}
GROUPED |= {"n_group": 4, "topk_group": 2}
ONE_GROUP = GROUPED | {"topk_method": "group_limited_greedy", "topk_group": 1}
SIGMOID = Routing(4, 2, "sigmoid", has_bias=True, normalise=True)


def router_of(kind: str, **options: Any) -> RouterMatch | None:
    """By the first layer with experts."""
    for block in make_model(known_config(kind, **options)).modules():
        if "experts" in block._modules:
            found = find_router(block, "experts")
            return None if found is None else found[1]
    raise AssertionError(f"{kind} has experts")


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("mixtral", {}, Routing(4, 2, normalise=True)),
        ("olmoe", {}, Routing(4, 2)),
        ("olmoe", {"norm_topk_prob": True}, Routing(4, 2, normalise=True)),
        ("minimax_m2", {}, SIGMOID),  # its bias is the block's
        ("afmoe", {}, SIGMOID),  # a submodule computes the logits
        ("dots1", {}, Routing(4, 2, "sigmoid", has_bias=True)),
        ("hy_v3", {}, Routing(4, 2, "sigmoid", has_bias=True, normalise=True, scale=2.826)),
        ("glm4_moe", GROUPED, Routing(8, 2, "sigmoid", 4, 2, 2, has_bias=True, normalise=True)),
        ("deepseek_v2", GROUPED | {"topk_method": "group_limited_greedy"}, Routing(8, 2)),  # two best groups
        ("deepseek_v2", ONE_GROUP, Routing(8, 2, "softmax", 4)),
        ("cohere2_moe", {}, Routing(4, 2, normalise=True)),  # a softmax of the chosen logits
        ("phimoe", {}, None),  # each expert's weight is of a softmax without the former one
        ("ernie4_5_moe", {}, None),  # a bias in a module of its own
        ("laguna", {}, SIGMOID),
        ("laguna", {"moe_router_logit_softcapping": 4.0}, None),
    ],
)
def test_a_router_is_known_by_its_results(kind: str, options: dict[str, Any], expected: Routing | None) -> None:
    found = router_of(kind, **options)
    assert (None if found is None else found.routing) == expected


class Block(nn.Module):
    """Experts that a softmax chooses. kind: what the block does with the router's results."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.gate, self.experts = Gate(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        logits, weight, chosen = self.gate(rows)
        if self.kind == "twice":
            self.experts(rows, chosen, weight)
        if self.kind == "scaled":
            weight = weight * 2.0
        if self.kind == "swapped":
            weight, chosen = chosen, weight
        return self.experts(rows, chosen, weight.to(x.dtype) if self.kind == "rounded" else weight).view(x.shape)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 16, device="meta"))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        logits = nn.functional.linear(x, self.weight)
        weight, chosen = logits.softmax(-1).topk(2, -1)
        return logits, weight, chosen


@pytest.mark.parametrize("kind", ["plain", "twice", "scaled", "rounded"])
def test_a_block_that_does_more_with_a_routers_results_keeps_its_router(kind: str) -> None:
    block = Block(kind)
    assert match_router(block.gate, flat=True) is not None
    assert (find_router(block, "experts") is not None) == (kind == "plain")


@pytest.mark.parametrize(
    ("kind", "options"), [("glm4_moe", GROUPED), *slow(("minimax_m2", {}), ("afmoe", {}), ("deepseek_v2", GROUPED))]
)
@pytest.mark.parametrize("tensor_parallel", [1, *slow(2)])
def test_answers_are_those_of_transformers(
    tmp_path: Path, kind: str, options: dict[str, Any], tensor_parallel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call of experts gets logits of Aerie's router, and marks of padding rows."""
    monkeypatch.setattr("aerie.workers.models.registry.ARCHITECTURES", {})
    if tensor_parallel > 1 and kind == "afmoe":
        pytest.skip("transformers has no plan for it")
    target = make_known(tmp_path, kind, **options)
    calls = []
    multiply = UnquantizedExperts.multiply

    def recording(self: Any, x: Any, router: Any, out: Any = None) -> Tensor:
        calls.append(isinstance(router, RouterLogits) and router.live is not None)
        return multiply(self, x, router, out)

    monkeypatch.setattr(UnquantizedExperts, "multiply", recording)
    check_greedy(target, tensor_parallel)
    assert all(calls) and bool(calls) == (tensor_parallel == 1)  # other ranks have processes of their own


def test_unquantised_experts_are_finished_only_where_a_router_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels choose experts from logits, which other routers do not give."""
    finished = []
    for kind in ("mixtral", "phimoe"):
        _, model = made(tmp_path / kind, kind)
        experts = [module for module in model.modules() if isinstance(module, RouterChosenExperts)]
        routers = [module for module in model.modules() if isinstance(module, MatchedRouter)]
        assert len(experts) == 4 and len(routers) == (4 if kind == "mixtral" else 0)
        for module in experts:
            monkeypatch.setattr(module.method, "finish", lambda options, kind=kind: finished.append(kind))
            module.finish(GEMMOptions())
    assert finished == ["mixtral"] * 4
