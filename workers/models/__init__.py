"""Target models. `decoder.Decoder` covers Llama 2/3, Qwen2 and Qwen3 (dense); `registry` maps architectures to it."""
