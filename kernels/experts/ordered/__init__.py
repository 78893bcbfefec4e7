"""Experts of few rows in deterministic engines.

ordered_rows_triton          up to 16 rows, with the bits of `aerie.kernels.experts.many_rows_triton`
ordered_row_products_triton  its kernels for one row
"""
