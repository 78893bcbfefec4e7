"""Processes that compile grammars and fill masks. They may be killed at any time.

template_process  imports the compiler once and forks the other processes
mask_host         tracks the grammars of a rank's requests and fills their masks within time limits; masks and guides
                  of a step, in memory shared with the rank
mask_jobs         masks that are being filled, and their limits
request_grammar   the state of one request's grammar: its matcher and emitted tokens
draft_guide       masks of a draft tree, and the guide for the next drafts
token_texts       the bytes of each token, and the tokens that spell a forced text
matcher           the compiler's matcher with undo
grammar_cache     compiled grammars, and the threads that compile them
trial             tries a grammar: whether it compiles, and the time of its masks
"""
