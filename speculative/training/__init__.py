"""Training of an embedded pair: a small chat target, and an EAGLE-3 head for any Llama or Qwen target.

    rows        JSON and JSONL rows in several forms -> conversations
    samples     conversations -> token sequences, and batches of about equal length
    tokenizer   a byte-level BPE tokenizer with a chat template
    target      a small Llama trained from scratch
    regenerate  what the target itself answers, the text that a draft has to predict
    vocabulary  the tokens a draft may propose (`d2t`, `t2d`)
    draft_model the EAGLE-3 head over whole sequences, unrolled on its own outputs
    draft       its loss against the target, and its training
    draft_files the published folder layout of a head
    acceptance  greedy chain acceptance from a table of matches
    loop        the optimisation loop both trainings share
    graphs      one step of it, eager or as a CUDA graph
    checkpoint  resuming a training
    errors      what the user is told to put right
    commands    what `aerie train-target` and `aerie train-draft` do
    arguments   what their arguments must be
    cli         their options

Nothing here knows the serving engine. The command line imports `cli` and `errors`, and `cli` the rest when it is run.
"""
