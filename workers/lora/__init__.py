"""LoRA adapters of the target, chosen by request (docs/lora.md).

adapter_config  adapter_config.json of peft: ranks and scales; refuses what is not served
adapter_file    the matrices of an adapter's folder, by this rank's layers
adapted_weight  loading and finishing of weights under adapters, for linear layers and experts
base_copies     whole weights in an adapter's file, compared with the base's
embedding       adds their part to the rows of the embedding
matrices        an adapter's matrices of a module, and of this rank's layers
expert_file     those of routed experts, in all forms that peft writes
experts         which routed experts adapters may change, and the `ExpertsMethod` that adds their part
shared_experts  shared experts with adapters on a GPU: their memory, and the kernels of routed experts beside them
latent          adapters of MLA's up-projection, which is multiplied head by head
layers          which layers adapters may change, and the `LinearMethod` that adds their part
"""
