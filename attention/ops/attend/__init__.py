"""Kernels of attention over paged KV, by how KV is kept and what a request brings. Called by the triton backend, which
also plans; the reference of all is `attention.backends.torch_backend`.

decode_triton            rounds (a few rows per request) over keys and values by heads
decode_plan_triton       tiles, scratch memory and the plan of a round
prefill_triton           prompt chunks over keys and values by heads
prefill_plan_triton      prompt chunks in tiles, listed on the device
latent_decode_triton     rounds over latent rows
latent_prefill_triton    prompt chunks over latent rows
latent_suffix_triton     masked columns added to attention over the prefix of latent rows
expanded_prefill_triton  prompt chunks over keys and values computed from latent rows
split_kv_triton          which program reads which part of whose context, decided on the device
merge_states_triton      partial results of a request become one
online_softmax_triton    one tile of the online softmax
latent_tile_triton       one tile of latent rows
window_triton            which KV positions a row sees through a window
"""
