"""Experts of transformers in the adapter: which ones Aerie's replace, by results, and those that keep gathering
weights."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.granitemoe_swa.modeling_granitemoe_swa import GraniteMoeSWAExperts

from aerie.kernels.capability import Capability
from aerie.kernels.experts.gated import GELU_TANH, GPT_OSS, SWIGLU, GatedActivation
from aerie.workers.models.adapter import routers
from aerie.workers.models.adapter.matching import match_experts
from aerie.workers.models.adapter.routers import GatheringExperts, RouterChosenExperts
from aerie.workers.models.adapter.survey import make_model
from tests.support.known_models import known_config, make_known
from tests.support.slow import slow
from tests.support.target_answers import check_logprobs
from tests.workers.models.adapter.test_fused import made

LIMITED = GatedActivation(alpha=1.5, limit=300.0, shift=1.0)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("mixtral", {}, SWIGLU),
        ("granitemoe_swa", {"hidden_act": "gelu_pytorch_tanh"}, GELU_TANH),
        ("granitemoe_swa", {"hidden_act": "gelu"}, None),
        ("minimax_m3_vl_text", {}, GPT_OSS),
        ("minimax_m3_vl_text", {"swiglu_alpha": 1.5, "swiglu_limit": 300.0}, LIMITED),
        ("gpt_oss", {}, None),  # rows of gate and up projections in turn, and biases
    ],
)
def test_experts_are_known_by_their_results(
    kind: str, options: dict[str, Any], expected: GatedActivation | None
) -> None:
    found = [each for each in make_model(known_config(kind, **options)).modules() if hasattr(each, "_apply_gate")]
    assert found and {match_experts(each) for each in found} == {expected}


def test_other_modules_are_no_experts() -> None:
    assert all(match_experts(each) is None for each in make_model(known_config("llama")).modules())


@pytest.mark.parametrize("kind", ["mixtral", "granitemoe_swa", "llama"])
def test_gpus_whose_experts_would_wait_are_refused(tmp_path: Path, kind: str) -> None:
    config, _ = made(tmp_path, kind)
    expected = contextlib.nullcontext() if kind == "llama" else pytest.raises(ValueError, match="experts need a GPU of")
    with expected:
        config.check_device(Capability("cuda", (8, 0)), torch.bfloat16, "model x")
    config.check_device(Capability("cuda", (9, 0)), torch.bfloat16, "model x")


GELU: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh"}


@pytest.mark.parametrize(
    ("kind", "options", "tensor_parallel"),
    [
        ("granitemoe_swa", {}, 1),
        *slow(("minimax_m3_vl_text", {}, 1)),
        *slow(("granitemoe_swa", GELU, 1), ("granitemoe_swa", {}, 2), ("minimax_m3_vl_text", {}, 2)),
        *slow(("granitemoe", {}, 1), ("granitemoeshared", {}, 1), ("mixtral", GELU, 1), ("mixtral", GELU, 2)),
    ],
)
def test_experts_of_other_kinds_of_checkpoints_are_not_gathered(
    tmp_path: Path, kind: str, options: dict[str, Any], tensor_parallel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stacked in one tensor, or with another activation than SiLU."""
    monkeypatch.setattr("aerie.workers.models.registry.ARCHITECTURES", {})
    _, model = made(tmp_path / "config", kind, **options)
    assert sum(isinstance(module, RouterChosenExperts) for module in model.modules()) == 4
    assert not any(isinstance(module, GatheringExperts) for module in model.modules())
    check_logprobs(make_known(tmp_path / "target", kind, **options), tensor_parallel)


def test_rows_of_gathering_experts_are_computed_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part has 4 rows, each of 2 experts, whose 3 matrices have 64 x 96 float32 numbers."""
    monkeypatch.setattr("aerie.workers.models.registry.ARCHITECTURES", {})
    monkeypatch.setattr(routers, "_MAX_GATHERED_BYTES", 4 * 2 * 3 * 64 * 96 * 4)
    target = make_known(tmp_path, "granitemoe_swa", hidden_act="gelu")
    rows: list[int] = []
    apply_gate: Any = GraniteMoeSWAExperts._apply_gate

    def recording(self: Any, gate_up: Tensor) -> Tensor:
        rows.append(gate_up.shape[0])
        found: Tensor = apply_gate(self, gate_up)
        return found

    monkeypatch.setattr(GraniteMoeSWAExperts, "_apply_gate", recording)
    check_logprobs(target)
    assert max(rows) == 8 and 2 in rows
