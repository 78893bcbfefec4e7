"""The Python API: an engine in the user's own process, without Ray and HTTP, under vLLM's names. Users import it as
`aerie.LLM` and `aerie.AsyncLLM`.

llm              `LLM`: lists of prompts
async_llm        `AsyncLLM`: one request at a time, streamed in an event loop
engine           model, tokenizer and engine, which both share; `EngineArgs`; parameters and methods of vLLM's that
                 are refused by name
engine_thread    runs the engine's loop in a thread; receivers: take tokens to threads and event loops
sampling_params  parameters of a request
prompts          prompts of all forms, and chats, as token ids; names a prompt's LoRA adapter
outputs          outputs, and answers while they are generated; the engine's metrics
"""
