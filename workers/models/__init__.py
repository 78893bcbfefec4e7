"""Target models, from a checkpoint's folder to a module on this rank (docs/add-a-model.md).

registry   architecture -> family; `family` what a family's file says
llama      Llama 2 and 3, Qwen2, Qwen3 (dense)
llama4     Llama 4's text part, up to its attention chunk
deepseek   DeepSeek-V2 and V3: latent attention and mixtures of experts
qwen       Qwen's mixtures of experts and hybrids
glm        GLM's mixtures of experts
gpt_oss    gpt-oss: sinks, windows, experts with biases
gemma      Gemma 2 and 3
olmo       OLMo 2 and 3: norms after attention and MLP
granite    Granite 3, and 4 without recurrent layers
mistral    Mistral and Ministral: a Llama over windows; `phi3` one with packed matrices
adapter    every other decoder of transformers
moe        what families with experts share
config     `ModelConfig`, what every target has, and how Hugging Face spells it
decoder    `TargetModel`, what a target is to its callers; `Decoder`, what every family's is: embedding, layers, head
name_map   `NameMap`: a family's declaration of what the checkpoint calls its tensors
weights    safetensors -> parameters, with errors that name what does not fit
loading    all of it in order, and the size of the KV pool
"""
