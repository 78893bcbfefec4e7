"""Products with low-bit weights on Hopper, with CUDA C++ kernels (`aerie.kernels.cuda_source`).

product_cuda  chooses between these kernels and Triton's
tiles         tile sizes, by the number of rows
kernels_cuda  launches few_rows.cu (up to 32 rows, mma), wide.cu (17 to 32) and many_rows.cu (wgmma)
gated_mlp_cuda  launches gated_mlp.cu: gate, up and down projections of few rows; gated_mlp_tiles: its sizes
experts_cuda  launches one_row_experts.cu: MXFP4 experts of one row; one_row_tiles: its sizes
"""
