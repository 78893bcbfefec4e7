"""`deterministic: true`: its guarantee, and the configurations that exclude it. Used by `aerie.workers.runner.build`.

The option makes the target batch-invariant on a GPU: the logits of a token depend only on the tokens before it, bit for
bit. GEMMs, experts and attention compute a row with the same operations in the same order
(`aerie.kernels.gemm.skinny_triton.fixed_rows`, `aerie.kernels.experts.many_rows_triton`,
`aerie.attention.backends.triton_backend.fixed_span`). The other rows of the batch, the chunking of prompts, and the
kind of a row (prompt, non-speculative round, tree) have no effect. Norms, RoPE, gates and sampling are row-wise anyway.

A greedy or seeded answer is therefore the same with and without speculation, alone and in a batch, with a cached prefix
and after a preemption, on GPUs of one kind with the same software. The draft is computed as usual, because it affects
acceptance, not the answer. The option costs speed, especially for prompts, whose GEMMs read the weights once per 64
rows. Experts use blocks of 64 rows, even for few rows. On a CPU the option has no effect and guarantees nothing.
"""

import torch

from aerie.kernels.capability import Capability
from aerie.workers.config import WorkerConfig
from aerie.workers.models.config import ModelConfig

MAX_RANKS = 2  # sums of two are commutative; for more ranks, libraries choose the order of a sum by its size
GEMM_INPUTS = (
    128  # inputs of a GEMM must be a multiple of this, see `aerie.kernels.gemm.skinny_triton.skinny_gemm_tiles`
)


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
    if dtype.itemsize != 2:
        return f"dtype={str(dtype).removeprefix('torch.')}: the GEMMs need a 16-bit type; set dtype: bfloat16"
    if target.state_groups(worker.tensor_parallel, dtype):
        return "recurrent layers: rows of a tree or prompt round differently from single rows; serve another model"
    if worker.tensor_parallel > MAX_RANKS:
        return (
            f"tensor_parallel={worker.tensor_parallel}: the order of a sum over more than {MAX_RANKS} ranks depends on "
            f"its size; set tensor_parallel: {MAX_RANKS}"
        )
    for name, size in target.linear_inputs(worker.tensor_parallel).items():
        if size % GEMM_INPUTS:
            return (
                f"{name} of {size} on each rank: the GEMMs need a multiple of {GEMM_INPUTS}; set another "
                "tensor_parallel or serve another model"
            )
    return None
