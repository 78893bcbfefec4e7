"""Configuration of the KV cache and of attention backends. Plain values, validated at the edge by `cluster.config`."""

from dataclasses import dataclass

PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache of one engine; target and draft share page ids.

    page_size: tokens per page. num_pages: pages in the pool of each rank, page 0 excluded (it takes the writes of
    padding rows); None sizes the pool from `memory_gb`. memory_gb: memory per rank in GB (10^9 bytes) for the KV of
    target and draft and for the tables of running requests. prefix_cache: keep the pages of finished requests for later
    prompts with the same beginning.
    """

    page_size: int = 16
    num_pages: int | None = None
    memory_gb: float = 1.0
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size={self.page_size}: must be a power of two up to 64; try 16 or 32")
        if self.num_pages is not None and self.num_pages < 2:
            raise ValueError(f"num_pages={self.num_pages}: must be at least 2; leave it out to size it from memory_gb")
        if self.memory_gb <= 0:
            raise ValueError(f"memory_gb={self.memory_gb}: must be above 0; try 1.0")


@dataclass(frozen=True)
class TargetAttention:
    """Backend names of the target: `prefill` for prompt chunks, `decode` for decoding and tree verification. One of
    torch, triton, flashinfer, trtllm (table in `attention.registry`), or "auto": triton on a GPU, torch on a CPU."""

    prefill: str = "auto"
    decode: str = "auto"


@dataclass(frozen=True)
class DraftAttention:
    """Backend names of the draft: `prefill` for prompt chunks, `extend` for accepted rows, `decode` for tree steps."""

    prefill: str = "auto"
    extend: str = "auto"
    decode: str = "auto"
