"""Qwen's targets, except the dense ones (`aerie.workers.models.llama`).

qwen3_moe  Qwen2's and Qwen3's mixtures of experts
hybrid     hybrids of recurrent layers and attention: what the families `qwen3_next` and `qwen3_5` share
qwen_vl    text parts of vision models
"""
