"""Weights of 4 or 8 bits with a scale per group of inputs, and products with 16-bit rows.

weight    `PackedWeight`: `pack` builds one from a checkpoint's codes, `dequantize` is the reference
product   y = x W^T + b; cuda: int4 on Hopper; product_triton chooses a kernel by the number of rows:
  stream_triton      up to 32 rows: streams the weight into tensor cores (fragments_triton, decode_ptx, sums_triton)
  blocks_triton      up to 512 rows: blocks of 64 outputs, by wgmma
  cuda/gated_mlp_cuda  an MLP of few rows in one launch
  product_triton     more rows (with cuda: more than 4,096): dequantises some outputs at a time for cuBLAS
tiles     tile sizes, and the workspace
experts   the weighted sum of each row's experts; cuda: one row with MXFP4 weights on Hopper; experts_triton chooses a
          kernel by the number of rows:
  expert_gate_up_triton  gate and up projections
  expert_down_triton     down projections (expert_steps_triton: one step of both)
adapted_experts  the same with LoRA adapters
expert_tiles  tile sizes of the experts' kernels, and the workspace
"""
