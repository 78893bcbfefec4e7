"""Which token comes next, for every row of a pass, the same on every rank.

sampler  penalties, temperature, filters, Gumbel noise, argmax; log-probabilities
filters  what top-k, top-p and min-p keep, in torch
masks    what a grammar does not allow
kernels  the same on GPUs (Triton)
"""
