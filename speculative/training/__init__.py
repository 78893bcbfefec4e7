"""Training of drafts: EAGLE-3 heads, block heads, and the target's own MTP module.

    commands     what the command does
    rows         JSON and JSONL rows in several formats -> conversations
    samples      conversations -> token sequences, and their batches
    generation   a target's own answers to prompts
    trainer      the optimisation, on transformers' `Trainer`, and its time limit
    draft        what a draft is to its training: the interface, folders and checkpoints
    losses       a draft compared with its target: losses of chains and blocks, and greedy acceptance
    layers       transformers' layers as drafts use them, drafts of one token per step, steps replayed from CUDA graphs
    eagle3       EAGLE-3 heads over whole sequences, and their files
    adapters     a target merged with a LoRA adapter, and adapters of EAGLE-3 heads for it
    mtp          a target's own MTP module over whole sequences, and its files
    blocks       block heads over whole sequences, with a block after each anchor
    block_kinds  DFlash, DSpark and DFlash2, and their files
    head_learner a served head that is trained further on its target's texts

`aerie.deploy.train_draft` has the options of `aerie train-draft`, and imports `commands` when it runs: the modules need
torch and accelerate. From the engine they import only descriptions of models and drafts.
"""


class TrainingError(ValueError):
    """Invalid input of the user, in one line: option or file, value, fault and remedy. The command prints it and exits
    with status 2; other exceptions are bugs and keep their traceback."""


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C has ended a training; the message names the saved checkpoint and says how to continue."""
