"""A stand-in for FlashInfer's `trtllm_batch_decode_with_kv_cache_mla`, in torch, after the documentation and argument
checks of 0.6.17: what it takes, refuses and returns. It does with its scratch what a kernel may do."""

from typing import Any

import torch
from torch import Tensor

SEMAPHORE_BYTES = 8 << 20  # of XQA, at the beginning of its workspace
LATENTS = {(512, 64), (256, 64)}
MULTIPROCESSORS = 148

# The function's arguments in 0.6.17, in their order; those without a default first.
REQUIRED = (
    *("query", "kv_cache", "workspace_buffer", "qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim"),
    *("block_tables", "seq_lens", "max_seq_len"),
)
OPTIONAL = (
    *("sparse_mla_top_k", "out", "bmm1_scale", "bmm2_scale", "sinks", "skip_softmax_threshold_scale_factor"),
    *("enable_pdl", "backend", "is_var_seq", "uses_shared_paged_kv_idx", "lse", "return_lse", "cute_dsl_impl"),
    *("kv_scale_format", "cum_seq_lens_q", "max_q_len", "multi_ctas_kv_counter_buffer", "sparse_mla_top_k_lens"),
    *("enable_dcp", "cp_world", "cp_rank", "causal_seqlens_kv_global"),
)


class MlaStandIn:
    """backend: the kernels that this GPU has, "trtllm-gen" or "xqa". calls: the arguments of every call."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.calls: list[dict[str, Any]] = []
        self._scratch: set[int] = set()

    def __call__(self, **given: Any) -> Tensor | tuple[Tensor, Tensor]:
        assert set(REQUIRED) <= set(given) <= {*REQUIRED, *OPTIONAL}, "arguments of another version"
        self.calls.append(given)
        query, rows, tables, lengths = given["query"], given["kv_cache"], given["block_tables"], given["seq_lens"]
        latent, rotated = given["kv_lora_rank"], given["qk_rope_head_dim"]
        batch, q_len, heads, size = query.shape
        assert given["backend"] == self.backend, "a device has one of them"
        assert query.is_contiguous() and query.dtype == rows.dtype == torch.bfloat16, "results are bfloat16"
        assert (latent, rotated) in LATENTS and size == rows.shape[-1] == latent + rotated and rows.ndim == 3
        assert tables.shape[0] == lengths.shape[0] == batch and tables.dtype == lengths.dtype == torch.int32
        assert given["max_seq_len"] == tables.shape[1] * rows.shape[1]
        assert isinstance(given["bmm1_scale"], float) and given["bmm2_scale"] == 1.0
        self._check_kernel(given, batch, q_len, heads, rows.shape[1])
        if query.is_meta:
            out, lse = query.new_empty((batch, q_len, heads, latent)), given.get("lse")
        else:
            out, lse = self._attended(given, latent)
        return (out, lse) if given.get("return_lse") else out

    def _check_kernel(self, given: dict[str, Any], batch: int, q_len: int, heads: int, page_size: int) -> None:
        workspace, counters = given["workspace_buffer"], given.get("multi_ctas_kv_counter_buffer")
        assert workspace.dtype == torch.uint8 and workspace.is_contiguous()
        if self.backend == "xqa":
            assert q_len == 1 and heads == 128 and page_size in (16, 32, 64, 128)
            assert given["block_tables"].shape[1] * page_size % 128 == 0
            assert counters is None and not given.get("return_lse") and given.get("lse") is None
            zero, stats = workspace[:SEMAPHORE_BYTES], 0
        else:
            assert page_size in (32, 64) and not 64 < heads < 128
            assert counters.numel() >= 4 * (-(-max(batch * heads, MULTIPROCESSORS) // 8) * 8)
            zero, stats = counters, 8 * heads * batch * 256 if given.get("return_lse") else 0
        assert workspace.numel() > stats, "statistics of the softmax lie in the workspace"
        if zero.is_meta:
            return
        assert not zero.any(), "semaphores are zero before a launch"
        if workspace.data_ptr() not in self._scratch:
            assert not workspace.any(), "zero before its first launch"
        self._scratch.add(workspace.data_ptr())
        workspace[SEMAPHORE_BYTES : SEMAPHORE_BYTES + 4096].fill_(0x7F)  # whatever it needs, but for semaphores

    def _attended(self, given: dict[str, Any], latent: int) -> tuple[Tensor, Tensor | None]:
        query, rows, lse = given["query"].float(), given["kv_cache"], given.get("lse")
        out = torch.empty((*query.shape[:3], latent), dtype=torch.bfloat16)
        stats = torch.empty(query.shape[0], query.shape[2])
        for request, length in enumerate(given["seq_lens"].tolist()):
            assert length > 0, "a request without KV has no result"
            assert query.shape[1] == 1, "what several rows see of each other is not documented"
            pages = given["block_tables"][request, : -(-length // rows.shape[1])].long()
            kv = rows[pages].flatten(0, 1)[:length].float()
            scores = query[request, 0] @ kv.T * given["bmm1_scale"]
            out[request, 0] = (scores.softmax(-1) @ kv[:, :latent]).bfloat16()
            stats[request] = scores.logsumexp(-1) / torch.tensor(2.0).log()
        if lse is None:
            return out, None
        assert lse.dtype == torch.float32 and lse.shape in (stats.shape, (query.shape[0], 1, query.shape[2]))
        lse.view(stats.shape).copy_(stats)
        return out, lse
