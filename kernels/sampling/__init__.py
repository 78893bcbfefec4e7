"""Sampling operations: from a step's logits to its tokens.

masks         mask the tokens that a grammar forbids
penalties     penalties, logit biases and min_tokens
filters       top-k, top-p and min-p limits
gumbel        Gumbel noise from (seed, position, token)
choose        samples a token: filters, temperature, noise, argmax
draft_scores  draft logits with the request's noise and filters
logprobs      log-probabilities of the most likely tokens
"""
