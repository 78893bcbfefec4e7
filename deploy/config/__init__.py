"""Finds or makes the configuration of a command.

files          Serve config files: the packaged ones, relative paths
keys           every key with its default and meaning
model          a configuration made from a model's name and options; model_options: these options
vllm_options   options of `vllm serve`, and the keys that they become; vllm_values: their values
hub            models by their names on the hub
"""
