"""Experts with LoRA adapters: the products of the layers' weights are those of other rooms.

product  adds the adapters' parts to a product of experts, by row and expert; kernels in product_triton, for CPUs in
         product_host
grouped  the sum of each row's experts with adapters, in torch; in Triton sorted_rows_triton (kernels: cells_triton)
"""
