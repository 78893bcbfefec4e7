"""Products with int4 weights on Hopper by CUDA C++ kernels (`attention.ops.cuda_source`).

product_cuda  chooses between these kernels and Triton's
tiles         tile sizes, by the number of rows
kernels_cuda  launches few_rows.cu (up to 32 rows, mma), wide.cu (17 to 32) and many_rows.cu (wgmma), with packed.cuh
"""
