"""Estimates of the accepted drafts of each tree shape.

survival        estimates by request, depth and shape
difficulty      corrections by how certain the target is of each request's text
request_odds    corrections by what recent requests and each request have accepted
match_survival  estimates for drafts that are copied from the request's own text, by length of the match
"""
