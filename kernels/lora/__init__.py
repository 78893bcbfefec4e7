"""Adapters of linear layers (LoRA, arXiv 2106.09685).

product  adds the adapters' parts to a layer's result, by row

Triton kernels are in NAME_triton, the implementation for CPUs in NAME_host.
"""
