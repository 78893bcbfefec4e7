"""Target models, loaded from checkpoint folders (docs/add-a-model.md).

registry   maps architectures to families and MTP modules; the declarations of a family
llama      Llama 2 and 3, Qwen2, Qwen3 (dense)
llama4     Llama 4's text part, up to its attention chunk
deepseek   DeepSeek-V2 and V3: latent attention and mixtures of experts
qwen       Qwen's mixtures of experts and hybrids
glm4_moe   GLM-4.5 and later; `deepseek` serves GLM-4.7-Flash
gpt_oss    gpt-oss: sinks, windows, experts with biases
gemma      Gemma 2 and 3
olmo       OLMo 2 and 3: norms after attention and MLP
granite    Granite 3, and 4 without recurrent layers
mistral    Mistral and Ministral: Llama layers over windows; `phi3`: Llama layers with packed matrices
adapter    every other decoder of transformers
moe        common parts of families with experts
config     `ModelConfig`, the configuration of every target, read from config.json
decoder    `TargetModel`, the interface of targets; `Decoder`, the base of all families: embedding, layers, head
name_map   `NameMap`: a family's tensor names in checkpoints
gguf       GGUF files as checkpoints
weights    loads safetensors or GGUF into parameters; errors name the tensors that do not fit
loading    loads a target: configuration, checks and weights
"""
