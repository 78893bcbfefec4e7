"""Mixtures of experts: from a router's logits to the weighted sum of each row's experts.

router_gemm    a router's logits in float32, in parts; route: who is chosen for each row, in one launch
weights        what all products read, and how few rows are cut
few_rows       a round's few rows, in two launches (few_row_products)
many_rows      in the order of `order`: of verified batches (short_blocks) and of prompts (tall_blocks)
gate_products  what few_row_products and short_blocks do for gates
"""
