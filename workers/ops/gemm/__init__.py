"""y = x W^T for weights of 16 and 32 bits.

skinny_triton  the few rows of a round; `fixed_rows` for deterministic serving
splits_triton  sums that several programs share
"""
