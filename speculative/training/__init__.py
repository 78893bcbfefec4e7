"""Training of an embedded pair: a small chat target, and an EAGLE-3 head for any Llama or Qwen target. And of a small
model of DeepSeek-V3's shape with its module for multi-token prediction, and of such modules further.

    rows        JSON and JSONL rows in several forms -> conversations
    samples     conversations -> token sequences, and batches of about equal length
    tokenizer   a byte-level BPE tokenizer with a chat template
    target      a small Llama trained from scratch
    regenerate  what the target itself answers, the text that a draft has to predict
    vocabulary  the tokens a draft may propose (`d2t`, `t2d`)
    deepseek    a small DeepSeek-V3 and its module, trained from scratch
    deepseek_layers  its layer over whole sequences
    deepseek_files   the published folder layout of target and module
    draft_model the EAGLE-3 head over whole sequences, unrolled on its own outputs
    mtp_model   the module for multi-token prediction, likewise
    draft       a draft's loss against the target, and its training
    draft_files the published folder layout of a head
    draft_kinds how a draft of each method is begun, saved and loaded
    acceptance  greedy chain acceptance from a table of matches
    loop        the optimisation loop both trainings share
    graphs      one step of it, eager or as a CUDA graph
    checkpoint  resuming a training
    errors      what the user has to put right
    commands    what `aerie train-target` and `aerie train-draft` do
    deepseek_command  what `aerie train-deepseek` does
    arguments   what their arguments must be
    cli         their options

Of the engine nothing is known here but how it describes models and drafts. The command line imports `cli` and `errors`,
and `cli` the rest when it is run.
"""
