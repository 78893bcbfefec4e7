"""What `deterministic: true` refuses, in the words of a refused start; what it means is tested on GPUs."""

import dataclasses

import pytest
import torch
from torch import nn

from aerie.attention.config import CacheConfig, TargetAttention
from aerie.attention.recurrent.layout import StateGroup, StateLayout
from aerie.kernels.capability import Capability
from aerie.kernels.delta_rule.tables import DeltaHeads
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.speculative.build import EngineSpec, plan_engine
from aerie.workers.config import LoraConfig, WorkerConfig
from aerie.workers.models.adapter.layers import Leaf, LeafEmbedding
from aerie.workers.runner.deterministic import checked_deterministic
from tests.support.embedded import embedded_spec
from tests.support.engine_plans import build_worker

GPU = Capability("cuda", (9, 0))


def wanted(**changes: object) -> WorkerConfig:
    return dataclasses.replace(embedded_spec(None).worker, deterministic=True, **changes)  # type: ignore[arg-type]


def check(worker: WorkerConfig, dtype: torch.dtype = torch.bfloat16, device: Capability = GPU, **target: int) -> bool:
    config = dataclasses.replace(plan_engine(embedded_spec(None)).target, **target)  # type: ignore[arg-type]
    return checked_deterministic(worker, config, dtype, device)


def test_the_embedded_pair_can_be_served_deterministically() -> None:
    assert check(wanted())
    assert check(wanted(attention=TargetAttention("triton", "triton")), torch.float16)
    assert not check(dataclasses.replace(wanted(), deterministic=False))


@pytest.mark.parametrize(
    "worker,dtype,target,message",
    [
        (
            wanted(attention=TargetAttention(prefill="flashinfer")),
            torch.bfloat16,
            {},
            "attention.prefill=flashinfer: only triton .* set attention.prefill: triton",
        ),
        (
            wanted(attention=TargetAttention(decode="trtllm")),
            torch.bfloat16,
            {},
            "attention.decode=trtllm: only triton",
        ),
        (wanted(lora=LoraConfig(experts=True)), torch.bfloat16, {}, "lora.experts: .* set lora.experts: false"),
        (wanted(), torch.float32, {}, "dtype=float32: .* set dtype: bfloat16"),
        (wanted(), torch.bfloat16, {"hidden_size": 480}, "hidden_size of 480 on each rank: .* multiple of 64"),
        (wanted(tensor_parallel=4), torch.bfloat16, {}, "intermediate_size of 224 on each rank"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_remedy(
    worker: WorkerConfig, dtype: torch.dtype, target: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^deterministic=true: not possible with {message}"):
        check(worker, dtype, **target)


@pytest.mark.parametrize(
    "cache,key_dim,message",
    [
        (CacheConfig(state_snapshot_dtype="bfloat16"), 128, "cache.state_snapshot_dtype=bfloat16: .* set float32"),
        (CacheConfig(), 96, "recurrent layers with keys of 96 and values of 128"),
    ],
)
def test_recurrent_layers_need_exact_states_and_sizes_of_the_kernels(
    cache: CacheConfig, key_dim: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = (StateGroup((0,), StateLayout(DeltaHeads(1, 2, key_dim, 128), torch.bfloat16)),)
    monkeypatch.setattr("aerie.workers.models.config.ModelConfig.state_groups", lambda *_: groups)
    with pytest.raises(ValueError, match=f"^deterministic=true: not possible with {message}"):
        check(wanted(cache=cache))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_any_number_of_ranks_sums_in_their_order(ranks: int) -> None:
    assert check(wanted(tensor_parallel=ranks), intermediate_size=4096)


def test_on_a_cpu_the_option_changes_nothing() -> None:
    worker = wanted(attention=TargetAttention("torch", "torch"))
    assert not check(worker, torch.float32, Capability("cpu"))
    spec = EngineSpec(worker)
    build_worker(spec, plan_engine(spec))


def test_modules_of_transformers_with_matrices_of_their_own_are_refused() -> None:
    """Not tables of rows, nor vectors."""

    def finish(module: nn.Module, kind: type[Leaf], deterministic: bool = True) -> None:
        module.__class__ = type(type(module).__name__, (kind, type(module)), {})
        module.finish(GEMMOptions(deterministic=deterministic))  # type: ignore[operator]

    with pytest.raises(ValueError, match="^deterministic=true: the sums of this model's Linear may .* set determ"):
        finish(nn.Linear(4, 4), Leaf)
    finish(nn.Linear(4, 4), Leaf, deterministic=False)
    finish(nn.LayerNorm(4), Leaf)
    finish(nn.Embedding(4, 4), LeafEmbedding)
