"""The Python API: an engine in the user's own process, without Ray and HTTP, under vLLM's names. Users import it as
`aerie.LLM` and `aerie.AsyncLLM`.

llm            `LLM`: lists of prompts
async_llm      `AsyncLLM`: one request at a time, streamed in an event loop
engine         model, tokenizer and engine, which both share; `EngineArgs`
engine_thread  runs the engine's loop in a thread; receivers: take tokens to threads and event loops
outputs        parameters of a request, and its outputs
"""
