"""What is sent back for a generation request: an endpoint's form of document and of stream events.

reply           what the forms have in common: the protocol, usage, speculation's statistics
openai          what chat and text have in common
chat            of /v1/chat/completions
text            of /v1/completions
responses       of /v1/responses
messages        of /v1/messages
native          of SGLang's /generate
response_items  items of /v1/responses and their events
logprobs        log-probabilities in OpenAI's two forms
streaming       server-sent events
"""
