"""Checks the configuration against its checkpoints before a start. Used by `deploy`. Imports torch."""

from typing import Literal

from attention.capability import Capability
from cluster.assembly import engine_spec
from cluster.config import AerieConfig, ConfigError
from cluster.http.text.tokenizer import ChatTokenizer
from speculative import build
from speculative.drafts.checkpoint_files import has_weights
from workers.engine_layout import EngineLayout
from workers.runner.layout import EnginePlan


def engine_layout(config: AerieConfig, device: Literal["cpu", "cuda"]) -> tuple[EngineLayout, build.WeightBytes | None]:
    """Return an engine's layout on a device and, for a GPU, the bytes of its weights. This machine need not have the
    device. A GPU is assumed to multiply FP8."""
    spec, here = engine_spec(config), Capability(device)
    engine = build.plan_engine(spec, here)
    return engine.layout, None if here.shares_host_memory else build.plan_weights(spec, engine, multiplies_fp8=True)


def check_checkpoints(config: AerieConfig, need_weights: bool = True) -> int:
    """Match the configuration with config.json of target and draft, the headers of their weight files and the
    tokenizer. Return the length of the longest request in tokens, for `cluster.plan.resolve`.

    need_weights: refuse folders without weight files, see `lacking_weights`.
    Raises ConfigError."""
    try:
        engine = _engine(config)
        _check_tokenizer(config.model.path, engine.target.vocab_size)
        if need_weights or not lacking_weights(config):
            build.check_weights(engine_spec(config), engine)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return engine.layout.max_model_len


def check_device(
    config: AerieConfig, device: Literal["cpu", "cuda"], capability: tuple[int, int] | None = None, here: bool = False
) -> None:
    """Raise ConfigError if an engine cannot start on a device: an attention backend does not support its mode, model or
    draft, or the device does not support `deterministic` or the experts.

    capability: of the GPUs; None if unknown.
    here: whether the GPUs are in this machine; then installed packages are checked, too."""
    try:
        build.check_device(engine_spec(config), _engine(config), Capability(device, capability), here)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def lacking_weights(config: AerieConfig) -> list[str]:
    """Return the checkpoint folders whose weight files are missing."""
    paths = [config.model.path, *([config.speculative.path] if config.speculative is not None else [])]
    return [path for path in paths if config.model.load_format != "dummy" and not has_weights(path)]


def _engine(config: AerieConfig) -> EnginePlan:
    """Build the engine's plan on the CPU, because the checking machine may have no GPU."""
    return build.plan_engine(engine_spec(config), Capability("cpu"))


def _check_tokenizer(path: str, num_embedded: int) -> None:
    """Raise ValueError if the tokenizer has tokens without an embedding in the target: such a token in a prompt would
    crash the worker."""
    known = ChatTokenizer.from_folder(path).vocab_size
    if known > num_embedded:
        raise ValueError(
            f"model.path={path}: its tokenizer has {known} tokens, its config.json vocab_size="
            f"{num_embedded}; use the tokenizer that the model was trained with"
        )
