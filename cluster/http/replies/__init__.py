"""Replies of generation requests: each endpoint's document and stream events.

reply           the interface of all replies; usage, and statistics of speculation
completions     /v1/chat/completions, /v1/completions
responses       /v1/responses
messages        /v1/messages
native          SGLang's /generate
inference       vLLM's /inference/v1/generate
response_items  items of /v1/responses and their events
logprobs        log-probabilities in the formats of OpenAI and vLLM
streaming       server-sent events
"""
