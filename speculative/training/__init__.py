"""Training of drafts: EAGLE-3 heads, block heads, and the target's own MTP module.

    cli              options of `aerie train-draft`
    commands         what the command does
    fit_options      the trainer's arguments from the command's
    rows             JSON and JSONL rows in several formats -> conversations
    samples          conversations -> token sequences, and their batches
    generation       a target's own answers to prompts
    trainer          the optimisation, on transformers' `Trainer`
    checkpoints      checkpoints of a training run, and the one that a resume continues
    steps            steps replayed from CUDA graphs, and their time limit
    draft            a draft's loss against a frozen target, its training and its acceptance
    eagle3           the EAGLE-3 head over whole sequences, unrolled on its own outputs
    eagle3_files     the published folder layout of a head
    blocks           DFlash, DSpark and DFlash2 heads over whole sequences, their loss and files
    mtp              a target's own MTP module over whole sequences, unrolled on its own outputs, and its files
    layers           drafts of one token a step; transformers' layers with attention over branches, experts for CUDA graphs

`deploy.cli` imports `cli`, and `cli` imports the others when a command runs: they need torch and accelerate. From the
engine they import only descriptions of models and drafts.
"""


class TrainingError(ValueError):
    """Invalid input of the user, in one line: option or file, value, fault and remedy. The command prints it and exits
    with status 2; other exceptions are bugs and keep their traceback."""


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C has ended a training; the message names the saved checkpoint and says how to continue."""
