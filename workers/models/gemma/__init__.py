"""Google's Gemma, text only.

gemma3        Gemma 2 and 3
gemma4        Gemma 4: its configuration and its model
gemma4_layer  a layer of Gemma 4, and the embedding that each layer has of its own
"""
