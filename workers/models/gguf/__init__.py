"""GGUF files (llama.cpp's format) as checkpoints.

header      reads and checks the metadata and the list of tensors
families    each architecture's config.json and tensor names
vocabulary  tokenizer.json and the files beside it
location    where the folder of a checkpoint is that stands for the files; a server reads that
folder      writes it
tensors     reads the weights of such a folder
"""
