"""OpenAI's API over any engine, in the order of a request's way. No Ray.

app            the application: its routes from `routes`, put together
config         what one ingress is configured with
middleware     request ids, who may ask, a last net for exceptions
keys           API keys as digests
origins        and without keys, which hosts and origins are answered
sending        replies to HEAD and to HTTP/1.0
routes         the routes, a module for each group
endpoint       one route: what comes in, what goes out, who answers
openapi        the routes as an OpenAPI document
docs_page      and that as a page for people
page           the page at `/`
schema         what travels, typed: requests and replies
admission      how many generations are carried at a time
requests       a checked body as prompts, sampling parameters and a grammar
text           between text and tokens, both ways
serving        carries out one generation request
engine_client  what is needed from an engine
thinking_budget  ends an answer's thinking after a number of tokens
prompt_scores  log-probabilities of a prompt, as they come
answer         token deltas, cut at stop strings, as text
parsers        what of an answer is content, reasoning, a tool call
replies        documents and stream events, a module for each form
errors         every error a client can see
tracing        a span for each generation request
counts         how the requests of one ingress ended
metrics        /metrics, Prometheus' text
"""
