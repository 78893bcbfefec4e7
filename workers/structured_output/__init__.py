"""Answers that must follow a grammar: what is accepted, how it is compiled, and which tokens it allows next.

json_schema      which JSON schemas are enforced whole, and how they are written for the compiler; refusals by keyword
schema_keywords  the keywords that are enforced, and what is demanded of each
compiler         grammars compiled for a model's vocabulary
grammar_cache    compiled grammars of a rank, and the thread that compiles them
mask_table       the tokens that the rows of a step may choose, on the device
guide_table      what drafts follow under grammars, on the device
slot_grammars    where each running request stands in its grammar, the masks and the guides of a step
draft_guide      one tree's masks, and the guide of the drafts after it
token_texts      what tokens spell, and how a demanded text is written in tokens
trial            the process in which the HTTP edge tries whether a grammar compiles
"""
