"""Products with int4 weights on Hopper by CUDA C++ kernels, which NVRTC compiles.

product_cuda  chooses between these kernels and Triton's
tiles         tile sizes, by the number of rows
kernels_cuda  few_rows.cu: up to 32 rows, by mma; wide.cu: more, by wgmma; packed.cuh: what both use

`attention.ops.cuda_source` compiles, loads and launches them.
"""
