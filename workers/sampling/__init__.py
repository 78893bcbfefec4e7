"""Sampling, and log-probabilities. The operations are in `aerie.kernels.sampling`.

sampler          penalties, temperature, filters, Gumbel noise, argmax; log-probabilities of the chosen tokens
prompt_logprobs  log-probabilities of prompt tokens, in blocks of rows
"""
