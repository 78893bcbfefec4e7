"""Grammars for tests.

sampled  schemas and grammars of requests, and whether a text follows one
hostile  generated grammars that are slow, deep or full of Unicode
"""
