"""Weights of 4 or 8 bits with a scale per group of inputs, and products with 16-bit rows.

weight    `PackedWeight`: `pack` builds one from a checkpoint's codes, `dequantize` is the reference
product   y = x W^T + b
experts   the weighted sum of each row's experts
"""
