"""Attention kernels over paged KV, which the triton backend plans and calls. Reference:
`aerie.attention.backends.torch_backend`.

decode_triton            rounds (a few rows per request), K/V heads
decode_plan_triton       tiles, scratch memory and plan of a round
prefill_triton           prompt chunks, K/V heads
prefill_plan_triton      cuts prompt chunks into tiles, on the device
latent_decode_triton     rounds, latent rows
latent_prefill_triton    prompt chunks, latent rows
latent_suffix_triton     adds a tree's masked columns to attention over the prefix, latent rows
expanded_prefill_triton  prompt chunks, keys and values computed from latent rows
split_kv_triton          cuts contexts into items for programs, on the device
merge_states_triton      merges the partial results of a request
online_softmax_triton    one tile of the online softmax
latent_tile_triton       one tile of latent rows
tree_mask_triton         what a row of a round sees: by its tree mask, and through a window
fixed                    deterministic attention: spans, and prompt chunks
references               attention in float64, for tests
scores                   `ScoreRule`: how a layer turns q . k into weights
flashinfer_plan_triton         plans FlashInfer's kernels for a round, on the device
flashinfer_latent_plan_triton  plans FlashInfer's MLA kernel for a round, on the device
"""
