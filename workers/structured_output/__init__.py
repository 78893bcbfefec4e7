"""Answers that must follow a grammar: what is accepted, how it is compiled, and which tokens it allows next.

json_schema  which JSON schemas are enforced whole, and how they are written for the compiler; refusals by keyword
compiler     grammars compiled for a model's vocabulary
trial        the process in which the HTTP edge tries whether a grammar compiles
"""
