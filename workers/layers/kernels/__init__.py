"""Triton kernels of the layers, each with its wrapper and a torch reference of a few lines. Importing a module here
needs triton; the layers do so on GPUs only.

skinny_gemm      y = x W^T, or gated, for the few rows of a round; `fixed_rows` for deterministic serving
splits           sums that several programs share
fp8/             rows and weights in FP8
experts/         mixtures of experts, from a router's logits to the sum
latent           norms, rotary embedding and KV write of multi-head latent attention; head_products: by a matrix of
                 each head; latent_values: those that make values, for few rows
argmax, topk     over a vocabulary shard's logits
"""
