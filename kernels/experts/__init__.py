"""Mixture of experts: from router logits to the weighted sum of each row's experts.

router_gemm      a router's logits in float32
route            chooses experts per row, in torch; route_triton: in one launch (kernel of one row: route_row_triton)
norm_route       residual addition, norm and routing of one row, in one launch
grouped          the sum of experts in torch, the reference, and checks of inputs for all implementations
fused            the interface of the fused experts; fused_triton chooses the kernels by number of rows
weights          layout of the weights, and tile sizes
few_rows_triton  up to 16 rows, in two launches (kernels: few_row_products_triton)
ordered          the same for deterministic engines
adapted          experts with LoRA adapters
many_rows_triton more rows, sorted by expert (order_triton; kernels: sorted_rows_triton)
gate_products_triton  gate and up projections for few_row_products_triton and sorted_rows_triton
"""
