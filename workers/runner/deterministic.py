"""`deterministic: true`: its guarantee, and the configurations that exclude it. Used by `aerie.workers.runner.build`.

The option makes the target batch-invariant on a GPU: the logits of a token depend only on the tokens before it, bit for
bit. Each part computes a row with the same operations in the same order, whatever the other rows of the batch:

- GEMMs: `aerie.kernels.gemm.ordered_triton`, one order of additions per weight for any number of rows.
- experts: `aerie.kernels.experts.many_rows_triton`, blocks of one expert's rows, even for few rows.
- attention: `aerie.kernels.attend.fixed.spans_triton`, spans that depend on positions only.
- recurrent layers: `aerie.kernels.delta_rule.recurrence_triton`, the recurrence token by token, also for prompts.
- sums over ranks: in rank order for every size (`aerie.workers.distributed.tp_group`).
- LoRA adapters: fixed slices of A x, in launches of their own (`aerie.kernels.lora.product_triton`).
- images: one at a time, by kernels and graphs that the image's size alone chooses (`aerie.workers.vision.tower`).

Norms, RoPE, gates, sampling and the rounding of activations to FP8 are row-wise anyway. So neither the chunking of
prompts, nor the kind of a row (prompt, non-speculative round, tree), nor other requests have an effect: a greedy or
seeded answer is the same with and without speculation, alone and in a batch, with a cached prefix and after a
preemption, on GPUs of one kind with the same software. The draft is computed as usual, because it affects acceptance,
not the answer. docs/exactness.md has the costs. On a CPU the option has no effect and guarantees nothing.
"""

import torch

from aerie.kernels.capability import Capability
from aerie.kernels.delta_rule.tables import KERNEL_DIMS
from aerie.kernels.experts.weights import WIDTH_STEP
from aerie.kernels.gemm.tiles import INPUT_STEP
from aerie.workers.config import WorkerConfig
from aerie.workers.models.config import ModelConfig


def checked_deterministic(worker: WorkerConfig, target: ModelConfig, dtype: torch.dtype, device: Capability) -> bool:
    """Return whether this engine computes deterministically: the option is set, and the device is a GPU.

    dtype: dtype of the weights.
    Raises ValueError with the remedy if the configuration excludes it.
    """
    if not worker.deterministic or not device.runs_kernels:
        return False
    reason = refusal(worker, target, dtype)
    if reason is not None:
        raise ValueError(f"deterministic=true: not possible with {reason}; or set deterministic: false")
    return True


def refusal(worker: WorkerConfig, target: ModelConfig, dtype: torch.dtype) -> str | None:
    """Return why the configuration excludes the guarantee, with the remedy; None if it does not."""
    for field, name in (("prefill", worker.attention.prefill), ("decode", worker.attention.decode)):
        if name not in ("auto", "triton"):
            return (
                f"attention.{field}={name}: only triton computes a row the same way in every batch; set "
                f"attention.{field}: triton"
            )
    if worker.model.images != "off" and any(target.score_rule(i).within_images for i in range(target.num_layers)):
        return "images whose tokens attend to later ones; set model.images: off"
    if worker.lora is not None and worker.lora.experts:
        return "lora.experts: the sums of an expert's adapters depend on the batch; set lora.experts: false"
    if dtype.itemsize != 2:
        return f"dtype={str(dtype).removeprefix('torch.')}: the GEMMs need a 16-bit type; set dtype: bfloat16"
    recurrent = target.state_groups(worker.tensor_parallel, dtype)
    if recurrent and worker.cache.state_snapshot_dtype != "float32":
        return (
            f"cache.state_snapshot_dtype={worker.cache.state_snapshot_dtype}: a state from the prefix cache would be "
            "rounded; set float32"
        )
    for heads in (group.layout.heads for group in recurrent):
        if not {heads.key_dim, heads.value_dim} <= set(KERNEL_DIMS):
            return f"recurrent layers with keys of {heads.key_dim} and values of {heads.value_dim}; serve another model"
    inputs, ranks = target.linear_inputs, worker.tensor_parallel
    for sizes, step in ((inputs(ranks), INPUT_STEP), (target.expert_inputs(ranks), WIDTH_STEP)):
        for name, size in sizes.items():
            if size % step:
                return (
                    f"{name} of {size} on each rank: the GEMMs need a multiple of {step}; set another "
                    "tensor_parallel or serve another model"
                )
    return None
