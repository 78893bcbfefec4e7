"""Mixtures of experts: from a router's logits to the weighted sum of each row's experts.

route                 which experts each row goes to, in torch; route_triton: in one launch
router_gemm_triton    a router's logits in float32, in parts
weights               the layout of all products' weights, and how small batches are cut into programs
few_rows_triton       a round's few rows, in two launches (few_row_products_triton)
many_rows_triton      rows in the order of `order_triton`: verified batches (short_blocks_triton) and prompts
                      (tall_blocks_triton)
gate_products_triton  the gate and up projections of few_row_products_triton and short_blocks_triton
"""
