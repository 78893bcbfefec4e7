"""The routes, each module a group: `endpoints(edge)` gives them for `aerie.cluster.http.app`.

generation      /v1/chat/completions, /v1/completions
responses       /v1/responses
messages        /v1/messages, /v1/messages/count_tokens
native          SGLang's /generate, /get_model_info
inference       vLLM's /inference/v1/generate
tokenization    /tokenize, /detokenize, /tokenizer_info
models          /v1/models, /version
status          /health, /health/live, /health/ready, /metrics
prefix_cache    /flush_cache, /reset_prefix_cache
administration  no route: what adapters and weights share
adapters        /v1/load_lora_adapter, /v1/unload_lora_adapter
skyrl           SkyRL's /collective_rpc, /skyrl/v1/generate, /skyrl/v1/load_lora_adapter
weights         /pause, /sleep, /abort_requests, /draft/versions, /update_weights and its sessions, /weight_info
"""
