"""Estimates of the accepted drafts of each tree shape.

survival        estimates by request, depth and shape
difficulty      what the target's certainty says of them
match_survival  estimates for drafts copied from the request's own text, by length of the match
"""
