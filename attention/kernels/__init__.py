"""Triton kernels, each with its wrapper and a torch reference of a few lines. Only `attention.backends.triton_backend`
and the models' layers call them; importing a module here needs triton, this one does not.

online_softmax   the step that both attention kernels share, and what Triton's interpreter needs
splits           which program reads which part of whose context, decided on the device
tail             DECODE, VERIFY, DRAFT_EXTEND, DRAFT_DECODE: few rows per request over paged KV
merge            partial results of a request become one
chunks           PREFILL: ragged causal chunks over paged KV
rope_store       rotary embedding of q and k, and the write of k and v to their pages
"""
