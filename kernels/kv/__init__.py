"""Paged KV, as kernels and attention backends see it.

batches              the batches of a forward pass: rounds and prompt chunks
views                one layer's KV, a type per layout
fp8                  FP8 in the KV cache, in torch; fp8_triton: in kernels
nan_values           keeps NaN out of stored values; nan_values_triton: in kernels
mask_bits            limits of a round's masks
slot_mapping         KV positions of a pass's rows, and the token indices that they write
move_path            moves the KV of an accepted path to the front of its tree
slot_mapping_triton  its kernel
move_path_triton     its kernel
"""
