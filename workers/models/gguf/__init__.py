"""GGUF files (llama.cpp's format) as checkpoints.

header      reads and checks the metadata and the list of tensors
families    each architecture's config.json and tensor names
vocabulary  tokenizer.json and the files beside it
location    path of the model folder that is made from the GGUF files; a server reads this folder
folder      writes the model folder
tensors     reads the weights by the model folder's list of tensors
"""
