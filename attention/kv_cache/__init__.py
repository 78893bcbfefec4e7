"""Pages and what is in them.

page_allocator   who holds which page (pure Python)
prefix_cache     which pages, and which states, an earlier prompt with the same beginning left (pure Python)
radix_node       a node of its tree
snapshots        rows that hold states of recurrent layers, and which state goes when none is free (pure Python)
prefix_digests   names for beginnings of prompts, of which prefix caches tell each other (pure Python)
layout           how layers keep their KV: the interface
heads            the layout of keys and values by heads
latent           the layout of latent rows, one for all heads
pool             the memory of one model on one rank
"""
