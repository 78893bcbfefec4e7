"""KV memory and attention over it. Knows tensors and pages; no models, no requests, no Ray.

config    what the KV cache and the backends are told
kv_cache  who holds which page, which pages an earlier prompt left, how layers keep their KV, and the memory itself
metadata  every ragged shape of a forward pass
backend   what an attention backend is
registry  the table of those that exist, and how the configured ones are chosen
limits    what each can serve, and why not
backends  one file for each
kernels   Triton kernels of ours
rotation  rotary embedding in torch
"""
