"""OpenAI's API over any engine (`engine_client`), in the order of a request's way. No Ray.

app            the application and its routes
config         what one ingress is configured with
middleware     request ids, API keys, a last net for exceptions
admission      how many generations are carried at a time
schema         what clients may send
request        a checked body as prompts and sampling parameters
prompts        prompts of every form, as token ids
chat_template  messages as a prompt's text
tokenizer      the model's tokenizer: text to tokens and back
serving        carries out one generation request
engine_client  what is needed from an engine
answer         token deltas, cut at stop strings, as text
detokenizer    tokens to text, one at a time
stop_strings   where an answer's text ends
response       documents and stream events
logprobs       log-probabilities in OpenAI's two forms
errors         every error a client can see
metrics        /metrics, Prometheus' text
"""
