"""y = x W^T for weights of 16 and 32 bits.

choice           chooses the GEMM of a layer; torch's GEMM
workspace        scratch memory shared by a model's GEMMs
tiles            tile sizes for small batches
skinny_triton    GEMM of decode steps, for small batches
ordered_triton   GEMM of deterministic engines, for any number of rows
ordered_cuda     the same for many rows, on Hopper (ordered.cu, and row_tiles.cuh, which
                 packed products use, too)
one_row_cuda     one row, on Hopper (one_row.cu)
gated_rows_cuda  gated products of 241 to 256 rows, on Hopper (gated_rows.cu)
split_k_cuda     209 to 256 rows and many inputs, on Hopper (split_k.cu)
wgmma_cuda       compiles and loads gated_rows.cu and split_k.cu
splits_triton    sums shared by several programs (split K)
blocks           arithmetic of tile sizes
"""
