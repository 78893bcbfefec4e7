"""Supported uses of each attention backend: one plain function per backend.

Imports no kernel library, so that any machine can refuse a start, or print the matrix of docs/attention-backends.md.
Each returns why its backend does not support a use; None if it does.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.capability import Capability
from aerie.kernels.kv.batches import Mode
from aerie.kernels.kv.stored_values import FP8

HALF_TYPES = (torch.bfloat16, torch.float16)
TRITON_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)  # first compute capability with conversion instructions
FP8_LEAST_DIM = 32  # even and odd dimensions are operands of their own, of at least 16 numbers
MAX_LATENT = 512  # largest size at which the sums of 64 rows fit in a program's registers
FLASHINFER_CAPABILITY = (8, 0)
FLASHINFER_HEAD_DIMS = (64, 128, 256)
FLASHINFER_LATENT = (512, 64)  # latent and rotated numbers of a row
XQA_MAJORS = (9, 12)
TRTLLM_GEN_MAJOR = 10
TRTLLM_PAGE_SIZES = (16, 32, 64)
TRTLLM_GEN_HEAD_DIMS = (64, 128, 256)
TRTLLM_LATENTS = {
    (512, 64): 128,
    (256, 64): 64,
}  # latent and rotated numbers of a row -> a head's keys without rotation
TRTLLM_LATENT_PAGES = (32, 64)
XQA_LATENT = (512, 64)
XQA_LATENT_HEADS = 128
XQA_MAX_HEAD_DIM = 256
XQA_MAX_GROUP = 32  # query heads per KV head: the rows of an XQA tile


@dataclass(frozen=True)
class AttentionUse:
    """The use of attention by one model in one mode on one rank.

    num_heads, num_kv_heads: heads of this rank.
    device: the rank's device. Refusals read its compute capability; `aerie.attention.registry.limit` tries each
        possible one.
    tree: whether masks branch (speculative.top_k above 1).
    layout: `kind` of its `KVLayout`.
    value_dim: size of a head's output, if not head_dim: for latent rows, the leading part that is also the value.
    window: maximum tokens that a row sees, in all layers (`speculative.window`); None for no limit.
    kv_dtype: dtype of the cache; None: `dtype`, that of the queries.
    scores: the distinct rules of its layers.
    head_dims: head size of each group of layers, if K/V heads differ in size or number; else empty.
    """

    mode: Mode
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    device: Capability
    tree: bool = False
    layout: str = "heads"
    value_dim: int | None = None
    window: int | None = None
    kv_dtype: torch.dtype | None = None
    scores: tuple[ScoreRule, ...] = ()
    head_dims: tuple[int, ...] = ()

    @property
    def is_fp8(self) -> bool:
        """Whether KV is in FP8 and queries are not."""
        return self.kv_dtype == FP8

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


def score_refusal(rules: Iterable[ScoreRule], served: frozenset[str], where: str = "") -> str | None:
    """Return a refusal for the first feature of the rules that is not in `served`; None if all are."""
    asked = {name: text for rule in rules for name, text in rule.features.items()}
    return next((f"{text}: not served{where}" for name, text in asked.items() if name not in served), None)


def torch_refusal(use: AttentionUse) -> str | None:
    return None


def triton_refusal(use: AttentionUse) -> str | None:
    """Return why Aerie's Triton kernels cannot serve this use; None if they can."""
    reason = _gpu_refusal(use, TRITON_CAPABILITY)
    if reason is None and use.is_fp8:
        least, name = (use.head_dim, "head_dim") if use.value_dim is None else (use.head_dim - use.value_dim, "rotated")
        refused = _gpu_refusal(use, FP8_CAPABILITY)
        if refused is None and least < FP8_LEAST_DIM:
            refused = f"{name}={least}: must be at least {FP8_LEAST_DIM}"
        reason = None if refused is None else f"KV in FP8: {refused}"
    if reason is not None:
        return reason
    if use.value_dim is None:
        reasons = map(triton_head_dim_refusal, use.head_dims or (use.head_dim,))
        return next((reason for reason in reasons if reason is not None), None)
    refused = score_refusal(use.scores, frozenset({"window"}), " over latent rows")
    return refused or triton_latent_refusal(use.value_dim, use.head_dim - use.value_dim)


def triton_latent_refusal(latent: int, rotated: int) -> str | None:
    """Return why our kernels have no tiles for latent rows of latent + rotated numbers; None if they have."""
    for name, size in (("kv_lora_rank", latent), ("qk_rope_head_dim", rotated)):
        if size < 16 or size & (size - 1):
            return f"{name}={size}: must be a power of two of at least 16"
    if latent > MAX_LATENT:
        return f"kv_lora_rank={latent}: must be at most {MAX_LATENT}"
    return None


def triton_head_dim_refusal(head_dim: int) -> str | None:
    """Return why our kernels have no tiles for head_dim; None if they have."""
    if head_dim < 16 or head_dim & (head_dim - 1):
        return f"head_dim={head_dim}: must be a power of two of at least 16"
    return None


def flashinfer_refusal(use: AttentionUse) -> str | None:
    """Return why FlashInfer's kernels cannot serve this use; None if they can."""
    reason = _gpu_refusal(use, FLASHINFER_CAPABILITY) or _dtype_refusal(use) or _mixed_refusal(use)
    if reason is None and use.value_dim is not None:
        return _fp8_refusal(use) or _flashinfer_latent_refusal(use)
    if reason is None and len({rule.scale for rule in use.scores}) > 1:
        return "layers with different scales: a pass is planned once, for one scale"
    if reason is None and use.head_dim not in FLASHINFER_HEAD_DIMS:
        return f"head_dim={use.head_dim}: must be one of {_list(FLASHINFER_HEAD_DIMS)}"
    return reason


def _flashinfer_latent_refusal(use: AttentionUse) -> str | None:
    """Return why FlashInfer's MLA kernels cannot serve this use of latent rows; None if they can."""
    assert use.value_dim is not None and use.device.compute is not None
    if use.mode is Mode.PREFILL:
        return "prompt chunks over latent rows: it attends to rounds only"
    if use.device.compute[0] != 9:
        return f"latent rows: {_capability_refusal(use, '9.x')}"
    (latent, rotated), sizes = FLASHINFER_LATENT, (use.value_dim, use.head_dim - use.value_dim)
    if sizes != FLASHINFER_LATENT:
        return f"kv_lora_rank={sizes[0]}, qk_rope_head_dim={sizes[1]}: must be {latent} and {rotated}"
    return None


def trtllm_refusal(use: AttentionUse) -> str | None:
    """Return why FlashInfer's TRT-LLM kernels cannot serve this use; None if they can. Compute capability 10.x uses
    trtllm-gen, 9.x and 12.x XQA."""
    reason = _gpu_refusal(use, (9, 0)) or _dtype_refusal(use) or _fp8_refusal(use) or _mixed_refusal(use)
    if reason is not None:
        return reason
    if use.value_dim is not None:
        return _trtllm_latent_refusal(use)
    if use.mode is Mode.DRAFT_DECODE and use.tree:
        return "a tree's draft rows see columns of earlier steps, and its masks are only as wide as the rows of a pass"
    if use.page_size not in TRTLLM_PAGE_SIZES:
        return f"page_size={use.page_size}: must be one of {_list(TRTLLM_PAGE_SIZES)}"
    assert use.device.compute is not None
    major = use.device.compute[0]
    if major == TRTLLM_GEN_MAJOR:
        return _trtllm_gen_refusal(use)
    return _xqa_refusal(use) if major in XQA_MAJORS else _capability_refusal(use, "9.x, 10.x or 12.x")


def _xqa_refusal(use: AttentionUse) -> str | None:
    if use.head_dim % 16 or use.head_dim > XQA_MAX_HEAD_DIM:
        return f"head_dim={use.head_dim}: must be a multiple of 16 up to {XQA_MAX_HEAD_DIM}"
    if use.group > XQA_MAX_GROUP:
        return f"{use.group} query heads for a KV head: must be at most {XQA_MAX_GROUP}"
    return None


def _trtllm_gen_refusal(use: AttentionUse) -> str | None:
    if use.mode is Mode.VERIFY and use.tree:
        return "a tree's mask: the kernels for compute capability 10.x (trtllm-gen) are causal only"
    if use.head_dim not in TRTLLM_GEN_HEAD_DIMS:
        return f"head_dim={use.head_dim}: must be one of {_list(TRTLLM_GEN_HEAD_DIMS)}"
    return None


def _trtllm_latent_refusal(use: AttentionUse) -> str | None:
    """As `trtllm_refusal`, for latent rows (MLA)."""
    assert use.value_dim is not None and use.device.compute is not None
    is_gen, sizes = use.device.compute[0] == TRTLLM_GEN_MAJOR, (use.value_dim, use.head_dim - use.value_dim)
    if not is_gen and use.device.compute[0] != max(XQA_MAJORS):
        return f"latent rows: {_capability_refusal(use, '10.x or 12.x')}"
    if use.dtype != torch.bfloat16:
        return f"dtype={_name(use.dtype)}: must be bfloat16 over latent rows"
    known = list(TRTLLM_LATENTS) if is_gen else [XQA_LATENT]
    if sizes not in known:
        wanted = " or ".join(f"{latent} and {rotated}" for latent, rotated in known)
        return f"kv_lora_rank={sizes[0]}, qk_rope_head_dim={sizes[1]}: must be {wanted}"
    if use.page_size not in TRTLLM_LATENT_PAGES:
        return f"page_size={use.page_size}: must be one of {_list(TRTLLM_LATENT_PAGES)} over latent rows"
    if is_gen and 64 < use.num_heads < 128:
        return f"{use.num_heads} query heads on a rank: must be at most 64, or at least 128, over latent rows"
    if not is_gen and use.num_heads != XQA_LATENT_HEADS:
        return f"{use.num_heads} query heads on a rank: must be {XQA_LATENT_HEADS} over latent rows on 12.x"
    if not is_gen and use.tree:
        return "a tree's mask: over latent rows XQA gives no log-sum-exps, to which masked columns could be added"
    return None


def _gpu_refusal(use: AttentionUse, least: tuple[int, int]) -> str | None:
    if use.device.compute is None:
        return f"device={use.device.type}: it needs a GPU"
    return _capability_refusal(use, f"{least[0]}.{least[1]} or later") if use.device.compute < least else None


def _capability_refusal(use: AttentionUse, wanted: str) -> str:
    assert use.device.compute is not None
    return f"compute capability {use.device.compute[0]}.{use.device.compute[1]}: must be {wanted}"


def _dtype_refusal(use: AttentionUse) -> str | None:
    return None if use.dtype in HALF_TYPES else f"dtype={_name(use.dtype)}: must be bfloat16 or float16"


def _fp8_refusal(use: AttentionUse) -> str | None:
    return "cache.dtype=fp8_e4m3: it reads KV of the model's dtype" if use.is_fp8 else None


def _mixed_refusal(use: AttentionUse) -> str | None:
    return "layers with different K/V heads: a pass is planned once, for heads of one size" if use.head_dims else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _list(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
