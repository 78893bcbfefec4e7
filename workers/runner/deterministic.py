"""`deterministic: true`: its guarantee, and the configurations that exclude it. Used by `workers.runner.build`.

On a GPU, the logits of a token then depend only on the tokens before it, to the bit. GEMMs, experts and attention of
the target compute a row with the same operations in the same order, whatever else is in the batch, whether the row is
of a prompt, a plain round or a tree, and however prompts are chunked (`workers.ops.gemm.skinny_triton.fixed_rows`,
`workers.ops.experts.many_rows_triton`, `attention.backends.triton_backend.fixed_span`). Norms, RoPE, gates and sampling
are row-wise anyway. So a greedy or seeded answer is the same with and without speculation, alone and beside others,
with a cached prefix and after a preemption, on GPUs of one kind with the same software. The draft is computed as usual:
it affects acceptance, not the answer.

It costs speed, most of all for prompts: their GEMMs read the weights once per 64 rows. Experts use blocks of 64 rows,
however few rows there are. On a CPU the option has no effect and promises nothing.
"""

import torch

from attention.capability import Capability
from workers.config import WorkerConfig
from workers.models.config import ModelConfig

MAX_RANKS = 2  # a + b = b + a; with more ranks, libraries choose the order of a sum by its size
GEMM_INPUTS = 128  # see `workers.ops.gemm.skinny_triton.skinny_gemm_tiles`


def checked_deterministic(worker: WorkerConfig, target: ModelConfig, dtype: torch.dtype, device: Capability) -> bool:
    """Whether this engine computes deterministically: it was asked to, and runs on a GPU. Raises ValueError with the
    remedy if it cannot.

    dtype: of the weights.
    """
    if not worker.deterministic or not device.runs_kernels:
        return False
    reason = refusal(worker, target, dtype)
    if reason is not None:
        raise ValueError(f"deterministic=true: cannot be kept with {reason}; or set deterministic: false")
    return True


def refusal(worker: WorkerConfig, target: ModelConfig, dtype: torch.dtype) -> str | None:
    """Return why answers on a GPU would depend on more than their requests; None if they would not."""
    for field, name in (("prefill", worker.attention.prefill), ("decode", worker.attention.decode)):
        if name not in ("auto", "triton"):
            return (
                f"attention.{field}={name}: only triton computes a row the same way in every batch; set "
                f"attention.{field}: triton"
            )
    if dtype.itemsize != 2:
        return f"dtype={str(dtype).removeprefix('torch.')}: the GEMMs need a 16-bit type; set dtype: bfloat16"
    if target.state_groups(worker.tensor_parallel, dtype):
        return "recurrent layers: rows of a tree and of a prompt round otherwise than rows alone; serve another model"
    if worker.tensor_parallel > MAX_RANKS:
        return (
            f"tensor_parallel={worker.tensor_parallel}: sums over more than {MAX_RANKS} ranks are ordered by their "
            f"size; set tensor_parallel: {MAX_RANKS}"
        )
    for name, size in target.linear_inputs(worker.tensor_parallel).items():
        if size % GEMM_INPUTS:
            return (
                f"{name} of {size} on each rank: the GEMMs need a multiple of {GEMM_INPUTS}; set another "
                "tensor_parallel or serve another model"
            )
    return None
