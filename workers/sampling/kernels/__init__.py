"""Sampling on GPUs, without sorting and without writing a changed copy of the logits. References are in
`workers.sampling`; importing a module here needs triton.

masks         what a grammar does not allow
penalties     penalties, biases and forbidden stop tokens, in one pass
filters       what top-k, top-p and min-p keep, by a search over gaps
gumbel        Gumbel noise from (seed, position, token)
choose        a random draw in one pass: filter, temperature, noise, argmax
draft_scores  logits as the draft sees them: noise, and filters by counts of levels
logprobs      log-probabilities of the most likely tokens
"""
