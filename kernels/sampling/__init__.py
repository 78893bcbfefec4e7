"""Sampling operations: from a step's logits to its tokens.

penalties     penalties, logit biases and min_tokens; mask the tokens that a grammar forbids
filters       top-k, top-p and min-p limits
choose        samples a token: filters, temperature, noise, argmax; Gumbel noise from (seed, position, token); log-
              probabilities of the most likely tokens
draft_scores  draft logits with the request's noise and filters
"""
