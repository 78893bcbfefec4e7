"""Names that vLLM (0.33) and SGLang (0.5) have for kernels, draft methods and parsers, and Aerie's names of the same.
Read by `aerie.deploy.config.vllm_values`."""

BACKENDS = {
    "FLASHINFER": "flashinfer",
    "FLASHINFER_MLA": "flashinfer",
    "TRITON_ATTN": "triton",
    "TRITON_MLA": "triton",
    "TRITON": "triton",
    "TORCH_SDPA": "torch",
    "TORCH_NATIVE": "torch",
}
# Aerie chooses its own kernels instead.
OTHER_BACKENDS = """
AITER ASCEND AUTO B12X COMPRESSED CPU_ATTN CPU_MLA CUTEDSL_MLA CUTLASS_MLA CUTLASS_MSA DIFFERENTIAL_FLASH_ATTN DSA DSV4
DUAL_CHUNK_FLASH_ATTN FA FA3 FA4 FLASHINFER_MLA_SPARSE FLASHMLA FLASHMLA_SPARSE FLASH_ATTN FLASH_ATTN_MLA FLEX_ATTENTION
HPC_ATTN HPC_OPS INTEL_AMX INTEL_XPU NSA ROCM_AITER_FA ROCM_AITER_MLA ROCM_AITER_UNIFIED_ATTN ROCM_ATTN TOKENSPEED_MLA
TREE_ATTN TRITON_MSA TRTLLM_MHA TRTLLM_MLA TURBOQUANT WAVE XFORMERS
"""
ALGORITHMS = {
    "EAGLE": "eagle",
    "EAGLE3": "eagle3",
    "NEXTN": "mtp",
    "FROZEN_KV_MTP": "mtp",
    "DFLASH": "dflash",
    "DSPARK": "dspark",
    "NGRAM": "suffix",
}
PARSERS = {
    **{name: name for name in ("hermes", "mistral", "deepseek_v3", "qwen3_coder", "glm45", "kimi_k2", "minimax_m2")},
    **{name: name for name in ("seed_oss", "granite", "gemma4", "phi4_mini", "harmony", "llama3", "pythonic")},
    "response_template": "response_template",
    "deepseek_r1": "think",
    "deepseek_v31": "deepseek_v3",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v3",
    "glm": "glm45",
    "glm47": "glm45",
    "gpt_oss": "harmony",
    "kimi": "kimi_k2",
    "llama3_json": "llama3",
    "llama4_json": "llama3",
    "llama4_pythonic": "pythonic",
    "minimax": "minimax_m2",
    "minimax_append_think": "minimax_m2",
    "minimax_m2_append_think": "minimax_m2",
    "nanbeige": "qwen3_coder",
    "nemotron_3": "think",
    "nemotron_v3": "think",
    "openai": "harmony",
    "openai_gptoss": "harmony",
    "phi4_mini_json": "phi4_mini",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "think",
    "qwen3_thinking": "think",
    "qwen3_xml": "qwen3_coder",
}
# Formats that Aerie looks for in the chat template.
OTHER_PARSERS = """
afmoe apertus apertus2509 auto bailing beam cohere2 cohere_command cohere_command3 cohere_command4 command3 cwm
deepseek_v32 deepseek_v4 deepseek_v41 deepseekv32 deepseekv4 deepseekv41 dots ernie45 ernie_x1 exaone4 exaone_moe
functiongemma gigachat3 gigachat35 granite4 granite_20b_fc granite_thinking granite_thinking_parser hf holo2 hunyuan
hunyuan_a13b hy_v3 hy_v4 hyv3 identity inkling internlm internlm2 interns1 iquest_q1 jamba jan_v3 k2_horizon kimi_k3
laguna lfm2 ling3 longcat mellum mimo minicpm5 minicpm5xml minicpmv minimax_m1 minimax_m3 muse muse_glimmer
musespark1x nano_v3 nemotron_json olmo3 plamo3 poolside_v1 qwen3_json solar_open spark25 step3 step3_5 step3p5
step5 trinity xlam
"""
