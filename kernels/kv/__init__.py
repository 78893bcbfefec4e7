"""Paged KV, as kernels and attention backends see it.

batches              the batches of a forward pass: rounds and prompt chunks; one layer's KV, a type per layout
stored_values        keeps NaN out of stored values; FP8 in the KV cache; stored_values_triton: both in kernels
mask_bits            limits of a round's masks
slot_mapping         KV positions of a pass's rows, and the token indices that they write; moves the KV of an accepted
                     path to the front of its tree
slot_mapping_triton  its kernels
"""
