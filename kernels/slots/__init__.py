"""Operations on the slot table.

commit  appends tokens to slots
finish  finish codes, without torch
"""
