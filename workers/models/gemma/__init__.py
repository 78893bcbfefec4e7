"""Google's Gemma, text only.

gemma3         Gemma 2 and 3
gemma4         Gemma 4
gemma4_config  its configuration
gemma4_layer   one of its layers, and the embedding that each layer has of its own
"""
