"""Configuration of the KV cache and of attention backends. Plain values, validated at the edge by
`aerie.cluster.config`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from aerie.attention.setting import Setting, check_settings

PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64)  # tokens per KV page that may be configured
LATENT_PAGE_SIZE = 64  # fastest for latent rows: one tile of attention, which one tensor map load brings
MAX_MEMORY_SHARE = 0.95  # upper bound of the configurable share of GPU memory
BACKEND_NAMES = ("torch", "triton", "flashinfer", "trtllm")  # the rows of `aerie.attention.registry.BACKENDS`
ROUNDS_ONLY = frozenset({"trtllm"})  # backends that do not attend to prompt chunks
FP8_E4M3 = "fp8_e4m3"
KV_DTYPES = ("auto", "model", FP8_E4M3)
MIN_WINDOW = 64  # minimum window of a draft: covers all columns of a round


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache of one engine; target and draft share page numbers.

    page_size: tokens per page, a power of two from 1 to 64. Use 64 for models with latent rows (DeepSeek): attention is
        up to a sixth faster.
    num_pages: pages of each rank, without page 0; none: as many as `memory_gb` holds.
    memory_gb: GB (10^9 bytes) per rank for the KV of target and draft and the tables of running requests; auto: the
        rest of `memory_share`.
    memory_share: total memory of a rank, as a share of the memory that is free at the start; at most 0.95.
    dtype: dtype of the target's KV: `fp8_e4m3` (half the bytes of 16 bits, with the checkpoint's scales or 1); `model`:
        the model's; auto: the checkpoint's (`kv_cache_scheme`, `kv_cache_quant_algo`), else the model's.
    draft_dtype: dtype of the draft's KV, with scales of 1; auto: the model's.
    prefix_cache: keep pages of finished requests for prompts with the same beginning.
    state_snapshots: saved states of recurrent layers per rank (Qwen3.5, Qwen3-Next), at which prompts with the same
        beginning resume; auto: one per 8,192 tokens of KV, within 20 and 50 % of their memory; 0: none.
    state_snapshot_dtype: dtype of saved states: float32 is exact; bfloat16 takes half the memory, but answers may
        differ from those without the cache.
    state_interval: tokens of an answer between saved states, a multiple of `page_size`; the next turn recomputes at
        most this many tokens.
    releasable: let `/sleep` free the memory of KV on GPUs; on CPUs it always can.
    routed_experts: store beside each token's KV which experts of each layer the router chose for it, so that requests
        may ask for them (`return_routed_experts` of /inference/v1/generate). Takes 1 byte a choice, 2 with more than
        256 experts, in all layers.
    """

    page_size: int = 16
    num_pages: Annotated[
        int | None,
        Setting("--num-gpu-blocks-override", ge=2, rule="at least 2; leave it out to size it from memory_gb"),
    ] = None
    memory_gb: Annotated[float | Literal["auto"], Setting(gt=0, rule="above 0; leave it out to take what is left")] = (
        "auto"
    )
    memory_share: Annotated[
        float,
        Setting(
            gt=0,
            le=MAX_MEMORY_SHARE,
            rule=f"above 0 and at most {MAX_MEMORY_SHARE}, as memory gets fragmented and drivers take some; leave it "
            "out for 0.9",
        ),
    ] = 0.9
    dtype: str = "auto"
    draft_dtype: str = "auto"
    prefix_cache: Annotated[bool, Setting("--enable-prefix-caching")] = True
    state_snapshots: Annotated[int | Literal["auto"], Setting(ge=0, rule="at least 0; or auto")] = "auto"
    state_snapshot_dtype: Literal["float32", "bfloat16"] = "float32"
    state_interval: int = 64
    releasable: Annotated[
        bool, Setting("--enable-sleep-mode --enable-memory-saver", note="/sleep frees the KV cache; weights stay")
    ] = False
    routed_experts: Annotated[bool, Setting("--enable-return-routed-experts")] = False

    def __post_init__(self) -> None:
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size={self.page_size}: must be a power of two up to 64; try 16 or 32")
        for name, value in (("dtype", self.dtype), ("draft_dtype", self.draft_dtype)):
            if value not in KV_DTYPES:
                raise ValueError(f"{name}={value}: is not a dtype of KV; choose one of {', '.join(KV_DTYPES)}")
        check_settings(self)
        if self.state_interval < 1 or self.state_interval % self.page_size:
            raise ValueError(
                f"state_interval={self.state_interval}: must be a multiple of page_size={self.page_size}; try 64"
            )


@dataclass(frozen=True)
class TargetAttention:
    """Attention backends of the target: a name of `BACKEND_NAMES`, or "auto" (triton on a GPU, torch on a CPU).
    `aerie.attention.registry` lists what each supports.

    prefill: backend for prompt chunks.
    decode: backend for decoding and verification.
    """

    prefill: str = "auto"
    decode: str = "auto"

    def __post_init__(self) -> None:
        _check_names(prefill=self.prefill, decode=self.decode)


@dataclass(frozen=True)
class DraftAttention:
    """Attention backends of the draft.

    prefill: for prompt chunks.
    extend: for the pass over accepted tokens.
    decode: for draft steps.
    """

    prefill: str = "auto"
    extend: str = "auto"
    decode: str = "auto"

    def __post_init__(self) -> None:
        _check_names(prefill=self.prefill, extend=self.extend, decode=self.decode)


def _check_names(**names: str) -> None:
    """Raise ValueError for names that are invalid for every model and device; `aerie.attention.registry.check_choices`
    makes the other checks."""
    for field, name in names.items():
        if name == "auto":
            continue
        if name not in BACKEND_NAMES:
            raise ValueError(
                f"{field}={name}: there is no such backend; choose one of auto, {', '.join(BACKEND_NAMES)}"
            )
        if field == "prefill" and name in ROUNDS_ONLY:
            able = ", ".join(other for other in BACKEND_NAMES if other not in ROUNDS_ONLY)
            raise ValueError(f"{field}={name}: {name} attends to rounds only; choose one of auto, {able}")
