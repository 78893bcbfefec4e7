"""Operations that draft, besides a draft model's layers.

suffix_match  drafts copied from the request's own text
guides        drafting under grammars: states, forced tokens, masks; the guides on the device
block_head    convolutions and candidates' scores of a DFlash2 head

Triton kernels are in NAME_triton, numpy implementations for CPUs in NAME_host.
"""
