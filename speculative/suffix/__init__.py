"""Drafts copied from a request's own text, without a model.

drafts  on a rank: looks up the newest tokens of each request, and writes what followed them into its tree
shapes  rounds that verify such drafts

`speculative.suffix_speculation` is an engine that drafts this way alone.
"""
