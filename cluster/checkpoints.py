"""The configuration checked against the checkpoints it names, before anything is started. Used by `deploy`."""

import dataclasses

from cluster.assembly import engine_spec
from cluster.config import AerieConfig, ConfigError
from cluster.http.tokenizer import ChatTokenizer


def with_checkpoints(config: AerieConfig) -> AerieConfig:
    """The configuration with what only the checkpoints know: model.max_model_len. Reads config.json of target and draft
    and the tokenizer, and matches them; raises ConfigError. Takes the seconds of importing torch."""
    from speculative.build import plan_layout

    # On the CPU, whatever the workers use: the machine that checks need not have their GPUs.
    on_cpu = dataclasses.replace(config.model, device="cpu")
    try:
        layout = plan_layout(engine_spec(config.model_copy(update={"model": on_cpu})))
        _check_tokenizer(config.model.path, layout.target.vocab_size)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    model = dataclasses.replace(config.model, max_model_len=layout.max_model_len)
    return config.model_copy(update={"model": model})


def _check_tokenizer(path: str, num_embedded: int) -> None:
    """Raises ValueError if the tokenizer knows tokens that the target has no embedding for: one in a prompt would end
    the worker."""
    known = ChatTokenizer.from_folder(path).vocab_size
    if known > num_embedded:
        raise ValueError(
            f"model.path={path}: its tokenizer has {known} tokens, its config.json vocab_size="
            f"{num_embedded}; use the tokenizer that the model was trained with"
        )
