"""A checked body as the request that the engine gets.

edge_request       the whole request: prompts, and one set of sampling parameters per choice
limits             checks against the configuration and the model's length
reasoning          what a chat asks about the model's reasoning
responses          /v1/responses as a chat
messages           /v1/messages as a chat
native             SGLang's /generate as completions
batch              several requests of one prompt each as one
prompts            prompts of every form, as token ids
sampling           the sampling parameters
structured_output  what an answer's form must be, as a grammar
grammar_checker    whether a grammar compiles
tools              which tools a chat may call, and must
"""
