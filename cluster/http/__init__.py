"""OpenAI's API over any engine, in the order of a request's path. Without Ray.

app            the application: all routes; the OpenAPI document, and the document as a page
config         configuration of one ingress
middleware     request ids, access, a last handler of exceptions, and replies to HEAD and to HTTP/1.0; hosts and
               origins that need no API key
keys           API keys as digests, with names
tenants        finds the key of a request, and what it may do; requests and tokens a minute, and generations in
               flight, of a key
routes         the routes, one module per group
endpoint       one route: its schemas and its handler
page           the page at `/`
schema         types of requests and replies
admission      limits concurrent generations and memory
requests       a checked body as prompts, sampling parameters and a grammar
text           text to tokens and back
serving        runs one generation request
calls          calls of the application without HTTP, for Serve's handles
engine_client  the interface to engines
answer         turns token deltas into text, cut at stop strings
parsers        separates content, reasoning and tool calls
replies        documents and stream events, one module per API
errors         every error that a client can get
tracing        a span per generation request
metrics        /metrics, Prometheus' text; one log line a generation request
"""
