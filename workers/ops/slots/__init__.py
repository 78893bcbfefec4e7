"""Operations on the slot table.

commit  appends tokens to slots
"""
