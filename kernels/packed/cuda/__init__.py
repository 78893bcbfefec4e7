"""Products with low-bit weights on Hopper, with CUDA C++ kernels (`aerie.kernels.cuda_source`).

tiles         tile sizes, by the number of rows
kernels_cuda  launches few_rows.cu (up to 32 rows, mma), wide.cu (17 to 32) and many_rows.cu (wgmma); chooses between
              these kernels and Triton's
gated_mlp_cuda  launches gated_mlp.cu: gate, up and down projections of few rows; gated_mlp_tiles: its sizes; launches
                one_row_experts.cu: MXFP4 experts of one row
"""
