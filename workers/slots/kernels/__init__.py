"""Triton kernels of a round's bookkeeping; importing a module here needs triton.

commit  what a round changes in a slot, in one launch
"""
