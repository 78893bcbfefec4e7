"""From a checkpoint folder to a target on this rank: configuration, checks, weights, and the size of its KV pool."""

from dataclasses import dataclass

import torch

from attention.config import CacheConfig
from attention.kv_cache.pool import KVPool
from workers.config import ModelSource
from workers.distributed.tp_group import TPGroup
from workers.layers.linear import kv_head_span
from workers.layers.linear_method import pack_all
from workers.models.config import ModelConfig, model_config_from_hf, read_config_json
from workers.models.decoder import Decoder
from workers.models.registry import check_target, check_tensor_parallel
from workers.models.weights import checkpoint_tensors, fill_dummy, load_parameters
from workers.runner.model_runner import resolve_dtype


def read_target_config(source: ModelSource, tensor_parallel: int) -> ModelConfig:
    """The target's configuration, checked; raises ValueError naming what is wrong and what would work."""
    config = model_config_from_hf(read_config_json(source.path), f"model {source.path}")
    check_target(config, f"model {source.path}")
    check_tensor_parallel(config, tensor_parallel, f"model {source.path}")
    limit = source.max_model_len
    if limit is not None and not 2 <= limit <= config.max_position:
        raise ValueError(
            f"model.max_model_len={limit}: must be 2 to the model's max_position_embeddings="
            f"{config.max_position}; leave it out to take that"
        )
    return config


def load_target(
    source: ModelSource,
    config: ModelConfig,
    group: TPGroup,
    device: torch.device,
    max_position: int,
    capture: tuple[int, ...] = (),
    deterministic: bool = False,
) -> Decoder:
    """This rank's shard of the target. max_position: rows of the rotary table, more than any position in a step.
    deterministic: see `pack_all`."""
    with torch.device("meta"):
        model = Decoder(config, group, max_position, device, capture)
    dtype = resolve_dtype(source.dtype, config.dtype, device)
    model.to(dtype).to_empty(device=device)
    if source.load_format == "dummy":
        fill_dummy(model, source.seed)
    else:
        optional = {"rotary_emb.inv_freq", "lm_head"} if config.tie_embeddings else {"rotary_emb.inv_freq"}
        tensors = checkpoint_tensors(source.path)
        load_parameters(model, tensors, f"model {source.path}", strip="model.", optional=frozenset(optional))
    pack_all(model, deterministic)
    return model.eval()


@dataclass(frozen=True)
class PoolSize:
    """How one model's KV looks on one rank."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @staticmethod
    def of(config: ModelConfig, tensor_parallel: int, dtype: torch.dtype) -> "PoolSize":
        first, end = kv_head_span(config.num_kv_heads, TPGroup(0, tensor_parallel))
        return PoolSize(config.num_layers, end - first, config.head_dim, dtype)

    def bytes_per_page(self, page_size: int) -> int:
        return KVPool.bytes_per_page(self.num_layers, page_size, self.num_kv_heads, self.head_dim, self.dtype)

    def make(self, num_pages: int, page_size: int, device: torch.device) -> KVPool:
        return KVPool(self.num_layers, num_pages, page_size, self.num_kv_heads, self.head_dim, self.dtype, device)


def pages_that_fit(cache: CacheConfig, pools: list[PoolSize], slot_bytes: int) -> int:
    """Pages per rank: cache.num_pages, or as many as memory_gb holds for all `pools` together, beside the slot_bytes
    that running requests' tables take."""
    if cache.num_pages is not None:
        return cache.num_pages
    per_page = sum(pool.bytes_per_page(cache.page_size) for pool in pools)
    pages = (int(cache.memory_gb * 1e9) - slot_bytes) // per_page - 1
    if pages < 2:
        raise ValueError(
            f"cache.memory_gb={cache.memory_gb}: holds {max(0, pages)} pages of {per_page} bytes beside {slot_bytes} "
            f"of tables for scheduler.max_running; give at least {(3 * per_page + slot_bytes) / 1e9:.4f}"
        )
    return pages
