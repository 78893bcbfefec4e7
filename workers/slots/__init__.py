"""What a running request is on the device.

slot_table   one row per slot: lengths, page tables, sampling parameters; commits
kernels      the commit, in one launch
"""
