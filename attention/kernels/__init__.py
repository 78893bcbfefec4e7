"""Triton kernels, each with its wrapper and a torch reference of a few lines. Only backends and the models' layers call
them; importing a module here needs triton, this one does not.

online_softmax   the step that both attention kernels share, and what Triton's interpreter needs
split_kv         which program reads which part of whose context, decided on the device
decode           DECODE, VERIFY, DRAFT_EXTEND, DRAFT_DECODE: few rows per request over paged KV
merge_states     partial results of a request become one
prefill          PREFILL: ragged causal chunks over paged KV
rope_store       rotary embedding of q and k, and the write of k and v to their pages
slot_mapping     where the rows of a decode batch are written, and their positions
move_path        the KV of an accepted path, moved to the front of its tree
flashinfer_plan  what FlashInfer's kernels read beside q and KV, written on the device
pdl              early launch: the rule that every kernel here keeps
"""
