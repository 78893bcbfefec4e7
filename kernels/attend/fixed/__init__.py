"""Attention of deterministic engines, beside the fixed plans of rounds.

spans_triton          spans of a context, the same for every batch, and how their results are added
path_triton           rows of trees along their paths, after `aerie.kernels.attend.decode_triton` has computed what they
                      share
fixed_prefill_triton  prompt chunks, with the bits of rounds
"""
