"""Converts a checked body to the engine's request.

edge_request       the whole request: prompts, and one set of sampling parameters per choice; joins requests of one
                   prompt each
parameters         checks against the configuration and the model's length; sampling parameters; reasoning
responses          /v1/responses as a chat
messages           /v1/messages as a chat
prompts            prompts of every form, as token ids; embeddings in the place of a prompt's tokens
structured_output  a body's structured-output parameters, as a grammar
image_reader       prepares the images of a conversation, in processes of their own
image_fetch        gets an image's bytes: data URLs, allowed hosts
image_prompt       puts images into a prompt
grammar_checker    checks that a grammar compiles
tools              tools that a chat may or must call
"""
