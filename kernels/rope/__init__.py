"""Rotary position embedding.

rope_store                norms per head, RoPE of q and k, and the write of k and v to their pages; the angles of
                          rows, and the rotation in torch
rope_store_normed_triton  its kernel for layers with norms per head
rope_store_triton         its kernel for other layers
rotate_heads              RoPE in place, for vision towers; rotate_heads_triton: its kernel
"""
