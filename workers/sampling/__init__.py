"""Chooses the next token of every row of a pass, equally on all ranks, with the operations of `workers.ops.sampling`.

sampler          penalties, temperature, filters, Gumbel noise, argmax; log-probabilities of the chosen tokens
prompt_logprobs  log-probabilities of prompt tokens, in blocks of rows
"""
