"""KV pages and their contents.

page_allocator   free list and reference counts of pages (pure Python)
nan_pages        pages that may hold NaN, zeroed before their next owner (pure Python)
window_pages     pages of layers with a window, attached to pages (pure Python)
slot_windows     the window pages that each running request holds (pure Python)
prefix_cache     finds pages and states of earlier prompts with a common prefix (pure Python); the order in which the
                 prefix cache evicts pages
radix_node       a node of the prefix cache's tree; digests of prompt prefixes, which engines advertise (pure Python)
snapshots        rows with states of recurrent layers, and their eviction (pure Python); how often snapshots are used,
                 by kind and age (pure Python)
layout           the interface of KV layouts; the layouts of keys and values per head, and of latent rows for all heads
releasable       memory that is given back and taken again at the same addresses
pool             the KV memory of one model on one rank
"""
