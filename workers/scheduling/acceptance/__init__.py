"""Estimates of the accepted drafts of each tree shape.

survival        estimates by request, depth and shape
match_survival  estimates for drafts copied from the request's own text, by length of the match
"""
