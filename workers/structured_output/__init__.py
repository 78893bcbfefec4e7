"""Answers that must follow a grammar: what is accepted, how it is compiled, and which tokens it allows next.

json_schema      which JSON schemas are enforced whole, and how they are written for the compiler; refusals by keyword
schema_keywords  the keywords that are enforced, and what is demanded of each
compiler         grammars compiled for a model's vocabulary
mask_table       the tokens that the rows of a step may choose, on the device
guide_table      what drafts follow under grammars, on the device
slot_grammars    the grammars of a rank's slots: their masks and guides in a step, and what the ranks agree on
host_link        a rank's connection to the process that fills its masks
mask_messages    what travels on it
framing          messages on a stream socket

In that process, or in those that try grammars:

template_process imports the compiler once, and forks both kinds of processes
mask_host        follows the grammars of a rank's requests, and fills their masks within limits
mask_jobs        masks being filled, and their limits
shared_table     the masks and guides of a step, in memory shared with the rank
guest            where the requests of a rank stand in their grammars
draft_guide      one tree's masks, and the guide of the drafts after it
token_texts      what tokens spell, and how a demanded text is written in tokens
matcher          the compiler's matcher, whose tries can be taken back in one call
grammar_cache    compiled grammars, and the threads that compile them
trial            what becomes of a grammar: whether it compiles, and what its masks cost
faults           why a grammar cannot be used
"""
