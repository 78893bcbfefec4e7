"""Norms, activations and gates: operations on single rows.

norm              RMSNorm, alone or with the residual addition; norm_triton: its kernels, and those of activations
head_norms        RMSNorm in torch, and the norms per head before rotary position embedding
rms_norm_triton   the formula of RMSNorm, for kernels
activation        activations of gated MLPs, and gates of attention and of shared experts; gate_triton: of gates
head_input        the input of an EAGLE-3 layer: two concatenated norms; head_input_triton: its kernel
"""
