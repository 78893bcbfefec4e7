"""What a running server answers: GSM8K's accuracy, acceptance length, and equality with speculation off.

gsm8k           the client
draft_methods   kinds of drafts on kinds of text
decoding        what the answers of an engine take without their prompts
draft_figures   tables and figures of its output
saved_states    texts of a hybrid whose saved states are rounded
word_problems   questions of GSM8K's form, made from a seed
"""
