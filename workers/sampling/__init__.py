"""Which token comes next, for every row of a pass, the same on every rank. In terms of `workers.ops.sampling`.

sampler          penalties, temperature, filters, Gumbel noise, argmax; log-probabilities of what was chosen
prompt_logprobs  log-probabilities of prompt tokens, in blocks of rows
"""
