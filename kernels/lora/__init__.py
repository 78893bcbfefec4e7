"""Adapters of linear layers (LoRA, arXiv 2106.09685).

product          adds the adapters' parts to a layer's result, by row
embedding        adds them to rows of an embedding table
few_rows_triton  device functions that add them in the launch of the layer's own product

The kernels of `product` and `embedding` are in NAME_triton, the implementation for CPUs in NAME_host.
"""
