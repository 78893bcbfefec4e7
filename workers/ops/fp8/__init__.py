"""Rows and weights in FP8 (float8_e4m3fn), with scales of groups of 128 columns or of whole rows.

rows               rows in FP8 with their scales; norm_triton: norms that write such rows
tiles              weights in FP8, and how products are cut into programs
gemm_triton        products of few rows
gemm_ahead_triton  products of the fewest, which read the weight before the rows are there
gemm_wide_triton   products of many
"""
