"""Replies of generation requests: each endpoint's document and stream events.

reply           the interface of all replies; usage, and statistics of speculation
logprobs        log-probabilities in the formats of OpenAI and vLLM
streaming       server-sent events
"""
