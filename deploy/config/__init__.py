"""Finds or builds the configuration of a command.

files          Serve config files: the packaged ones, relative paths; GGUF files by paths or hub names;
               published_model: the model of the quick start
keys           every key with its default, options and description
model          makes a configuration from a model's name and options; what a command line or a file amounts to, read
               and checked once
drafts         how to draft: with a published head, or with the model's own module
vllm_options   options of vLLM's and SGLang's servers: the parser's arguments, and the keys that they set
option_table   those of keys, and those that mean something else; option_names: those that set nothing, or are refused
vllm_values    reads their values; value_names: the others' names of parsers, kernels and draft methods
hub            downloads models by their hub names
"""
