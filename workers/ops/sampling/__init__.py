"""Operations of sampling, from a step's logits to the tokens that come next.

masks         tokens that a grammar does not allow
penalties     penalties, biases and forbidden stop tokens
filters       what top-k, top-p and min-p keep
gumbel        Gumbel noise from (seed, position, token)
choose        a random draw: filter, temperature, noise, argmax
draft_scores  logits as the draft sees them
logprobs      log-probabilities of the most likely tokens
"""
