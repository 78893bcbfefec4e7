"""Rows and weights in FP8 (float8_e4m3fn), with scales of groups of columns or of whole rows.

rows        rows in FP8 with their scales; norm: norms that make such
gemm        products of few rows, by the tables of `tiles`
gemm_ahead  of the fewest, whose weight is read before the rows are there
gemm_wide   of many
"""
