"""Rows and weights in FP8 (float8_e4m3fn), with a scale per 128 columns or per row.

rows     FP8 rows and their scales
product  y = x W^T + b for an FP8 weight; RMSNorm that returns FP8 rows. Kernels by the number of rows:
  gemm_ahead_triton  up to 8 rows and a W that fits in shared memory, loaded before the rows are ready
  gemm_triton        up to 128 rows
  product_triton     prompts; chooses between the three
tiles    FP8 weights, and tile sizes
"""
