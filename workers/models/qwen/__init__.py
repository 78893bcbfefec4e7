"""Qwen's targets, except the dense ones (`workers.models.llama`).

qwen3_moe  Qwen3's mixtures of experts
hybrid     hybrids of recurrent layers and attention: configuration and layers; `hybrid_names`: tensor names that
           they share
qwen3_next, qwen3_5  the families of hybrids
qwen_vl, qwen_vl_moe  text parts of vision models
"""
