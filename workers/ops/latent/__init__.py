"""Multi-head latent attention between its projections and its attention (DeepSeek-V2, arXiv 2405.04434).

normed_latents  norms, RoPE and the write of latent rows
head_products   rows times one matrix per head: absorbed keys, and values
latent_values   values in FP8
expand_latents  keys and values of a chunk's context, expanded
"""
