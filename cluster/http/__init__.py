"""OpenAI's API over any engine, in the order of a request's way. No Ray.

app                the application: its routes from `routes`, put together
config             what one ingress is configured with
middleware         request ids, API keys, a last net for exceptions
routes             the routes, a module for each group
endpoint           one route: what comes in, what goes out, who answers
openapi            the routes as an OpenAPI document
docs_page          and that as a page for people
schema             what travels, typed: requests and replies
admission          how many generations are carried at a time
request            a checked body as prompts and sampling parameters
responses          /v1/responses as a chat
sampling           of these the sampling parameters
prompts            prompts of every form, as token ids
chat_template      messages as a prompt's text
structured_output  what an answer's form must be, as a grammar
grammar_checker    whether a grammar compiles
tokenizer          the model's tokenizer: text to tokens and back
tools              which tools a chat may call, and must
serving            carries out one generation request
engine_client      what is needed from an engine
answer             token deltas, cut at stop strings, as text
detokenizer        tokens to text, one at a time
stop_strings       where an answer's text ends
output_parser      what of an answer is content, reasoning, a tool call: the seam
parsers            and the parsers, one for each form that models answer in
replies            documents and stream events, a module for each form
errors             every error a client can see
counts             how the requests of one ingress ended
metrics            /metrics, Prometheus' text
"""
