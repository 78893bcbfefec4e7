"""Operations over the slot table.

commit  what a round changes in a slot
"""
