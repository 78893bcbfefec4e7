"""How many drafts of each shape are expected to be accepted.

survival        by request, depth and shape
match_survival  the same where drafts are copied from the requests' own text
"""
