"""Finds or builds the configuration of a command.

files          Serve config files: the packaged ones, relative paths
keys           every key with its default and description
model          makes a configuration from a model's name and options
drafts         how to draft: with a published head, or with the model's own module
vllm_options   options of `vllm serve` and the keys that they set; vllm_values: their values
hub            downloads models by their hub names
"""
