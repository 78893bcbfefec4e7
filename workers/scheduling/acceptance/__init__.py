"""Estimates of the accepted drafts of each tree shape.

survival        estimates by request, depth and shape
difficulty      corrections by the target's certainty of each request's text
request_odds    corrections by the accepted drafts of recent requests and of each request
match_survival  estimates for drafts that are copied from the request's own text, by length of the match
"""
