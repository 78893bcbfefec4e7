"""Pages of KV: who holds them (plain Python), and the tensors they lie in.

page_allocator  who holds which page
prefix_cache    the pages of an earlier prompt with the same beginning
layout          how layers keep their KV: the interface; heads: keys and values by KV heads, the first layout
pool            the memory of one model on one rank
"""
