"""Kernels of one layer on a GPU, each beside the time that reading its bytes takes.

attention          every backend over K/V heads, in every mode, and prompt chunks
latent_attention   every backend over latent rows (MLA)
delta_rule         recurrent layers of the gated delta rule
delta_chunks       their prompt chunks, by kernel and tiles
experts            routing and both products of a layer of experts
linear             linear layers, by how their weights are stored
all_reduce         sums between GPUs
gpu_time           times by the GPU's events, CUDA graphs, the rate of a copy
"""
