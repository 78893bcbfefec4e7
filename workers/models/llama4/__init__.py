"""Llama 4's text part.

config  sizes, and which layers have experts and RoPE
model   experts, layers and tensor names
"""
