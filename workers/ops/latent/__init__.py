"""Multi-head latent attention, between its projections and its attention (DeepSeek-V2, arXiv 2405.04434).

normed_latents_triton  norms, rotary embedding and the write of latent rows
head_products_triton   rows times a matrix of each head: absorbed keys, and values
latent_values_triton   values for few rows, in FP8
expand_latents_triton  keys and values of a chunk's context, in full
"""
