"""The text models of Google's Gemma.

gemma3         Gemma 2 and 3
gemma4         Gemma 4; one of its layers, and the embedding that each layer has of its own
gemma4_config  its configuration
"""
