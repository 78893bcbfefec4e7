"""Answers that must follow a grammar: what is accepted, how it is compiled, and which tokens it allows next.

json_schema    which JSON schemas are enforced whole, and how they are written for the compiler; refusals by keyword
compiler       grammars compiled for a model's vocabulary
mask_table     the tokens that the rows of a step may choose, on the device
slot_grammars  where each running request stands in its grammar, and the masks of a step
trial          the process in which the HTTP edge tries whether a grammar compiles
"""
