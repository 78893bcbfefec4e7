"""y = x W^T for weights of 16 and 32 bits.

choice         which GEMM a layer gets, and torch's
workspace      what the products of a model share
tiles          how products of few rows are cut into programs
skinny_triton  the few rows of a round; `fixed_rows` for deterministic serving
splits_triton  sums that several programs share
"""
