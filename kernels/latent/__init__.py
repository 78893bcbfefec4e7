"""Operations of multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434), except attention itself.

latents         norms, RoPE and the write of latent rows; expands latent rows to keys and values, for prompt chunks
head_products   rows times one matrix per head, for absorbed keys and for values; values in FP8
"""
