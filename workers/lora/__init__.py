"""LoRA adapters of the target, chosen by request (docs/lora.md).

adapter_config  adapter_config.json of peft: ranks and scales; refuses what is not served
adapter_file    the matrices of an adapter's folder, by this rank's layers
shared_experts  launches the kernels of routed experts that passes with adapters multiply beside shared ones
latent          adapters of MLA's up-projection, which is multiplied head by head
layers          which layers adapters may change, and the `LinearMethod` that adds their part
"""
