"""Configuration of the KV cache and of attention backends. Plain values, validated at the edge by `cluster.config`."""

from dataclasses import dataclass
from typing import Literal

PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64)
LATENT_PAGE_SIZE = 64  # best for latent rows: a tile of attention over them, which a tensor map then brings whole
MAX_MEMORY_SHARE = 0.95
BACKEND_NAMES = ("torch", "triton", "flashinfer", "trtllm")  # the rows of `attention.registry.BACKENDS`
ROUNDS_ONLY = frozenset({"trtllm"})  # backends that do not attend to prompt chunks
MIN_WINDOW = 64  # of a draft: more than a round has columns, all of which a window then holds


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache of one engine; target and draft share page ids.

    page_size: tokens per page.
    num_pages: pages in the pool of each rank, page 0 excluded (it takes the writes of padding rows); None sizes the
        pool from `memory_gb`.
    memory_gb: memory per rank in GB (10^9 bytes) for the KV of target and draft and for the tables of running requests;
        "auto": what `workers.runner.memory` finds to be left.
    memory_share: of the device's memory that is free at the start, how much an engine may take in all.
    prefix_cache: keep the pages of finished requests for later prompts with the same beginning.
    """

    page_size: int = 16
    num_pages: int | None = None
    memory_gb: float | Literal["auto"] = "auto"
    memory_share: float = 0.9
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size={self.page_size}: must be a power of two up to 64; try 16 or 32")
        if self.num_pages is not None and self.num_pages < 2:
            raise ValueError(f"num_pages={self.num_pages}: must be at least 2; leave it out to size it from memory_gb")
        if self.memory_gb != "auto" and self.memory_gb <= 0:
            raise ValueError(f"memory_gb={self.memory_gb}: must be above 0; leave it out to take what is left")
        if not 0 < self.memory_share <= MAX_MEMORY_SHARE:
            raise ValueError(
                f"memory_share={self.memory_share}: must be above 0 and at most {MAX_MEMORY_SHARE}, as memory gets "
                "fragmented and drivers take some; leave it out for 0.9"
            )


@dataclass(frozen=True)
class TargetAttention:
    """Backend names of the target: `prefill` for prompt chunks, `decode` for decoding and tree verification. One of
    `BACKEND_NAMES`, or "auto": triton on a GPU, torch on a CPU. What each can serve is in `attention.registry`."""

    prefill: str = "auto"
    decode: str = "auto"

    def __post_init__(self) -> None:
        _check_names(prefill=self.prefill, decode=self.decode)


@dataclass(frozen=True)
class DraftAttention:
    """Backend names of the draft: `prefill` for prompt chunks, `extend` for accepted rows, `decode` for tree steps."""

    prefill: str = "auto"
    extend: str = "auto"
    decode: str = "auto"

    def __post_init__(self) -> None:
        _check_names(prefill=self.prefill, extend=self.extend, decode=self.decode)


def _check_names(**names: str) -> None:
    """Raises ValueError for what no model and no device can have; `attention.registry.check_choices` asks the rest."""
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
