"""State of the running requests on the device.

slot_table   one row per slot: lengths, page tables, sampling parameters; commits
upload       copies a step's arrays to the device
"""
