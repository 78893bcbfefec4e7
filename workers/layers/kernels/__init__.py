"""Triton kernels of the layers, each with its wrapper and a torch reference of a few lines. Importing a module here
needs triton; the layers do so on GPUs only.

skinny_gemm      y = x W^T, or gated, for the few rows of a round; `fixed_rows` for deterministic serving
fp8_rows         rows in FP8 with their scales; fp8_norm: norms that make such
fp8_gemm         products of few FP8 rows, by the tables of fp8_tiles; fp8_gemm_wide of many
splits           sums that several programs share
router_gemm      a router's logits in float32, in parts; route: who is chosen for each row, in one launch
few_row_experts  products of the experts of a round's few rows, in two launches (few_row_products); many_row_experts,
                 with rows in the order of expert_order: of verified batches (short_block_experts) and of prompts
                 (tall_block_experts); expert_weights: what all read, and how few rows are cut; gate_products: what the
                 first two do for gates
latent           norms, rotary embedding and KV write of multi-head latent attention; head_products: by a matrix of
                 each head
norm_activation  RMSNorm, with the residual add; silu_mul
argmax, topk     over a vocabulary shard's logits
"""
