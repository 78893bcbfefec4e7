"""What a running server answers: GSM8K's accuracy, acceptance length, and equality with speculation off.

gsm8k           the client
word_problems   questions of GSM8K's form, made from a seed
"""
