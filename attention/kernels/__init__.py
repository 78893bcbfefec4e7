"""Triton kernels, each with its wrapper and a torch reference of a few lines. Backends, layouts and `slot_mapping` call
them; importing a module here needs triton, this one does not.

pdl              early launch: the rule, and what every kernel launched early reads before it waits
online_softmax   the step that both attention kernels share, and what Triton's interpreter needs
split_kv         which program reads which part of whose context, decided on the device
decode_plan      tiles, memory and plan of the decode kernel
decode           DECODE, VERIFY, DRAFT_EXTEND, DRAFT_DECODE: few rows per request over paged KV
latent_tile      a tile of latent rows: scores and sums, both ways round
latent_decode    what decode is, over paged latent rows
latent_prefill   what prefill is, over paged latent rows
expanded_prefill what prefill is, over keys and values that were made of latent rows
merge_states     partial results of a request become one
prefill_plan     prompt chunks in tiles, listed on the device
prefill          PREFILL: ragged causal chunks over paged KV
slot_mapping     where the rows of a pass write
rope_store       rotary embedding of q and k, and the write of k and v to their pages
move_path        the KV of an accepted path to the front of its tree
flashinfer_plan  what FlashInfer's kernels read beside q and KV in a round
"""
