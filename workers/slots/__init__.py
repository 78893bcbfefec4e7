"""What a running request is on the device.

slot_table   one row per slot: lengths, page tables, sampling parameters; commits
upload       what a step brings from the host, in one copy
"""
