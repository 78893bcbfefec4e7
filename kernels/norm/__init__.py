"""Norms, activations and gates: operations on single rows.

norm         RMSNorm, alone or with the residual addition; the input of an EAGLE-3 layer: two concatenated norms;
             activations of gated MLPs, and gates of attention and of shared experts
norm_triton  their kernels; norm_cpp: kernels for CPUs
head_norms   RMSNorm in torch, and the norms per head before rotary position embedding
"""
