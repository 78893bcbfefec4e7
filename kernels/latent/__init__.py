"""Operations of multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434), except attention itself.

normed_latents  norms, RoPE and the write of latent rows
head_products   rows times one matrix per head, for absorbed keys and for values
latent_values   values in FP8
expand_latents  expands latent rows to keys and values, for prompt chunks
"""
