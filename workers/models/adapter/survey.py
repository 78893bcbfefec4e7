"""Finds the attention calls of a transformers model by running it on the meta device."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from aerie.kernels.attend.scores import ScoreRule
from aerie.workers.models.adapter.host_constants import HostConstants
from aerie.workers.models.adapter.matching import match_experts
from aerie.workers.models.adapter.rotation import RotationRecorder

ATTENTION = "aerie"  # the name of our attention among those of transformers
LENGTH_DEPENDENT = ("dynamic", "longrope")  # kinds of RoPE whose angles depend on the text's length
NUM_ROWS = 3  # tokens of a pass on the meta device
_NEEDS_NUMBERS = ("out of meta tensor", "register_meta")  # in errors of operations that the meta device cannot run
_MAX_REASON = 200  # maximum length of transformers' error in a refusal
_HARMLESS = {"dropout", "position_ids", "is_causal", "cache_position", "use_cache", "output_attentions"}


class UnservableError(ValueError):
    """The model is not supported, because it would be computed wrongly. The text continues a sentence that begins with
    the model's name."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention. Sizes are of the whole model.

    module: path of the calling module.
    head_dim: size of a head of q and k.
    value_dim: size of a head of v.
    scale, window, soft_cap, sinks: see `ScoreRule`.
    rotary: the module's RoPE function, if Aerie's kernel can replace it (`aerie.workers.models.adapter.rotation`).
    """

    module: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: bool
    rotary: str | None = None

    @property
    def rule(self) -> ScoreRule:
        return ScoreRule(self.scale, self.window, self.soft_cap, self.sinks)

    @property
    def cached_dim(self) -> int:
        """Size of a head in the KV pool: even, and equal for keys and values, which are padded with zeros."""
        longest = max(self.head_dim, self.value_dim)
        return longest + longest % 2


def attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """Attention function for transformers' models: call the module's `paged`, which `TransformersModel` sets.

    q, k, v: [1, heads, rows, head_dim], rotated.
    returns: [1, rows, heads, value_dim], None.
    """
    return module.paged(q, k, v, attention_mask, **options), None  # type: ignore[operator]


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)  # without a mask function, so that models create no masks


def make_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the model on the meta device. Raises UnservableError."""
    # experts gather weights: a loop over the chosen experts would wait for the device
    options = {"experts_implementation": "batched_mm"} if hasattr(config, "_experts_implementation") else {}
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION, dtype=torch.get_default_dtype(), **options
            )
    except Exception as error:  # classes refuse configurations with exceptions of any type
        raise UnservableError(f"cannot be made by transformers: {reason_of(error)}") from error
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            # with a padding id, some models look for padding in every pass, which syncs. Set through `vars`, because an
            # assignment checks the type
            vars(module.config)["pad_token_id"] = None
    return model.eval()


def survey(model: PreTrainedModel) -> tuple[AttentionCall, ...]:
    """Return the attention calls of one pass, in order. Raises UnservableError. model: on the meta device; unusable
    afterwards."""
    calls: list[AttentionCall] = []
    rotations = RotationRecorder(model)
    for path, module in model.named_modules():
        module.paged = _Recorder(path, module, calls, rotations)
        keep_angles(module)  # otherwise it reads the largest position, which has no value on the meta device
    ids = torch.zeros(1, NUM_ROWS, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), _marked_masks(model), HostConstants(ids.device):
            decoder(model)(input_ids=ids, position_ids=ids, use_cache=False)
    except UnservableError:
        raise
    except Exception as error:  # a model's own code may raise any exception
        raise UnservableError(_why_not_run(error)) from error
    if not calls:
        raise UnservableError("has no attention that could be served")
    modules = [call.module for call in calls]
    if len(set(modules)) < len(modules):
        raise UnservableError("calls attention of one layer twice in a pass")
    return tuple(calls)


def _why_not_run(error: Exception) -> str:
    if isinstance(error, NotImplementedError) and any(text in str(error) for text in _NEEDS_NUMBERS):
        return "reads numbers from the device in a pass (such as how many tokens each expert has), which no graph can"
    if _SlidingMask.__name__ in str(error):
        return "has a mask of its own, which Aerie has no operation for"
    return f"does not run as a decoder of tokens: {reason_of(error)}"


def keep_angles(module: nn.Module) -> None:
    """Make a RoPE module ignore the text's length. Some modules have a kind of RoPE for each kind of layer."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):
        module.rope_type = {layer: _without_length(kind) for layer, kind in kinds.items()}  # type: ignore[assignment]
    elif isinstance(kinds, str):
        module.rope_type = _without_length(kinds)  # type: ignore[assignment]


def _without_length(kind: str) -> str:
    return "default" if kind in LENGTH_DEPENDENT else kind


def reason_of(error: Exception) -> str:
    """Return the error's first line, cut to `_MAX_REASON` characters, after the error's type if that explains more."""
    lines = str(error).strip().splitlines()
    if not lines:
        return repr(error)
    line = lines[0] if len(lines[0]) <= _MAX_REASON else f"{lines[0][:_MAX_REASON]}..."
    return line if isinstance(error, ValueError | ImportError) else f"{type(error).__name__}: {line}"


def is_plain_embedding(module: nn.Module) -> bool:
    """Return whether the module only looks up rows, perhaps multiplied by `scalar_embed_scale`."""
    is_plain = type(module).forward is nn.Embedding.forward and not hasattr(module, "embed_scale")
    return isinstance(module, nn.Embedding) and (is_plain or hasattr(module, "scalar_embed_scale"))


def record_chosen(model: nn.Module) -> list[int]:
    """Return a list to which the model's next pass adds the number of experts per row, for each module that
    `match_experts` matches."""
    experts: list[int] = []

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        _, chosen, _ = inputs  # as transformers' modules pass them
        experts.append(chosen.shape[-1])

    for module in model.modules():
        if match_experts(module) is not None:
            module.register_forward_pre_hook(hook)
    return experts


def decoder(model: PreTrainedModel) -> nn.Module:
    """Return the part before the vocabulary head. Raises UnservableError if there is none."""
    inner = getattr(model, model.base_model_prefix, None)
    if not isinstance(inner, nn.Module):
        raise UnservableError(f"is a {type(model).__name__}, which has no part before its vocabulary head")
    if "position_ids" not in inspect.signature(inner.forward).parameters:
        raise UnservableError(f"is a {type(model).__name__}, which takes no position_ids")
    return inner


@dataclass(frozen=True)
class _SlidingMask:
    """Replaces the mask of a layer with a window."""

    window: int


def _causal(config: Any) -> None:
    return None  # transformers passes masks only to its own attention functions


def _sliding(config: Any) -> _SlidingMask:
    return _SlidingMask(config.sliding_window)


def _chunked(config: Any) -> None:
    raise UnservableError("has attention by chunks, which Aerie has no operation for")


# Results of `_marked_masks`, by transformers' mask functions, which return None for Aerie's attention.
_MASKS: dict[str, Callable[[Any], _SlidingMask | None]] = {
    "create_causal_mask": _causal,
    "create_sliding_window_causal_mask": _sliding,
    "create_chunked_causal_mask": _chunked,
}
_MASK_CHANGES = ("or_mask_function", "and_mask_function", "block_sequence_ids")


@contextmanager
def _marked_masks(model: nn.Module) -> Iterator[None]:
    """Make transformers' mask functions return a `_SlidingMask` for a window, and raise UnservableError for unsupported
    masks. Some models (Phi-MoE) pass the window only to the mask function, not to attention."""
    modules = {sys.modules[type(module).__module__] for module in model.modules()}
    theirs = [(module, name, getattr(module, name)) for module in modules for name in _MASKS if hasattr(module, name)]

    def marking(name: str) -> Callable[..., _SlidingMask | None]:
        def mark(config: Any, *args: Any, **others: Any) -> _SlidingMask | None:
            if any(others.get(change) is not None for change in _MASK_CHANGES):
                raise UnservableError("has a mask of its own, which Aerie has no operation for")
            return _MASKS[name](config)

        return mark

    try:
        for module, name, _ in theirs:
            setattr(module, name, marking(name))
        yield
    finally:
        for module, name, function in theirs:
            setattr(module, name, function)


class _Recorder:
    """Stands for a module's attention function during the survey."""

    def __init__(self, path: str, module: nn.Module, calls: list[AttentionCall], rotations: RotationRecorder) -> None:
        self._path, self._calls, self._rotations = path, calls, rotations
        self._causal = getattr(module, "is_causal", True)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Record one attention call of transformers, and return an empty result of its shape. q: [1, heads, rows,
        head_dim]; k, v: the same with KV heads. Raises UnservableError for attention that Aerie has no operation
        for."""
        unknown = sorted(key for key, value in others.items() if value is not None and key not in _HARMLESS)
        if mask is not None and not isinstance(mask, _SlidingMask):
            unknown.append("attention_mask")
        if unknown or not self._causal or others.get("is_causal") is False:
            raise UnservableError(
                f"has attention ({self._path}) with {', '.join(unknown) or 'rows that see later ones'}, which Aerie "
                "has no operation for"
            )
        num_heads, num_kv_heads = q.shape[1], k.shape[1]
        if num_heads % num_kv_heads:
            raise UnservableError(f"has {num_heads} query heads, no multiple of its {num_kv_heads} key and value heads")
        self._calls.append(
            AttentionCall(
                module=self._path,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=q.shape[3],
                value_dim=v.shape[3],
                scale=q.shape[3] ** -0.5 if scaling is None else float(scaling),
                window=mask.window if isinstance(mask, _SlidingMask) else sliding_window or None,
                soft_cap=softcap or None,
                sinks=s_aux is not None,
                rotary=self._rotations.function_of(self._path, q, k),
            )
        )
        return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])
