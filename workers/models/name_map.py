"""`NameMap`: translates the paths of a model's modules to the tensor names of its checkpoints.

Every family of `aerie.workers.models` declares its rules as templates such as "model.layers.{layer}.mlp.{part}".
`aerie.workers.models.weights` loads by them, and `aerie quantize` finds matrices by them.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import Tensor

from aerie.workers.layers.weighted import WeightKey, WrongTensorError

_KIND = ".{kind}"  # ending of a template for every tensor of a module: weight, weight_scale, bias, ...
_HOLE = re.compile(r"\{(\w+)\}")  # a template's variable
# Names of FP8 KV scales. Exporters put them in attention (compressed-tensors), in a projection (ModelOpt), or in a
# module inside attention (vLLM). Ours: `aerie.workers.layers.attention`.
_KV_SCALE = re.compile(r"(?:\.[kv]_proj|\.qkv_proj|\.attn)?\.([kv]_scale)$")
_UNUSED = ("*.q_scale",)  # queries are not quantised


@dataclass(frozen=True)
class Packed:
    """A pattern for checkpoint tensors that pack several tensors of the rules.

    name: name of the checkpoint's tensor, with holes as in the rules.
    parts: names of the tensors in it, as the rules have them; holes are filled as in `name`.
    split: (whole tensor, its kind; "" if the name has none) -> its parts, in order. Raises WrongTensorError if the
        shape does not fit.
    """

    name: str
    parts: tuple[str, ...]
    split: Callable[[Tensor, str], Sequence[Tensor]]

    def pieces(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]] | None:
        """Return the names and values of the parts of tensor `name`; None if the pattern does not match."""
        match = self._pattern.fullmatch(name)
        if match is None:
            return None
        names = [part.format_map(match.groupdict()) for part in self.parts]
        return list(zip(names, self.split(tensor, match.groupdict().get("kind", "")), strict=True))

    def holder(self, module: str) -> str | None:
        """Return the checkpoint's module that contains the part `module`; None if it is not a part. Only for patterns
        that end with a kind; the others are not modules."""
        matches = (pattern.fullmatch(module) for pattern in self._modules)
        match = next((candidate for candidate in matches if candidate is not None), None)
        return None if match is None else self.name.removesuffix(_KIND).format_map(match.groupdict())

    def holding(self, tensor: str) -> str | None:
        """Return the checkpoint's tensor that contains the part `tensor`; None if it is not a part. Only for patterns
        that do not end with a kind."""
        starts = [0, *(i for i, letter in enumerate(tensor) if letter == ".")]
        patterns = (self._endings.get(tensor[start:]) for start in starts)
        matches = (pattern.fullmatch(tensor) for pattern in patterns if pattern is not None)
        match = next((candidate for candidate in matches if candidate is not None), None)
        return None if match is None else self.name.format_map(match.groupdict())

    @cached_property
    def _endings(self) -> dict[str, re.Pattern[str]]:
        """Return patterns of parts by the text after their last hole: a fast lookup, because a layer of experts has
        hundreds of parts."""
        if self.name.endswith(_KIND):
            return {}
        return {part.rpartition("}")[2]: _pattern(part) for part in self.parts}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return _pattern(self.name)

    @cached_property
    def _modules(self) -> list[re.Pattern[str]]:
        return [_pattern(part.removesuffix(_KIND)) for part in self.parts] if self.name.endswith(_KIND) else []


def _pattern(path: str) -> re.Pattern[str]:
    """Return the pattern of a path with holes; each hole matches one component."""
    pieces = _HOLE.split(path)  # text, hole, text, hole, ..., text
    return re.compile("".join(f"(?P<{piece}>[^.]+)" if i % 2 else re.escape(piece) for i, piece in enumerate(pieces)))


@dataclass(frozen=True)
class NameMap:
    """Maps our modules and keys to the checkpoint's names, and back for loading.

    rules: path of our module -> the checkpoint's module. Both may have holes in braces. A hole of the path matches one
    component, which fills the hole of the same name; the key fills {part} and {expert}. The first matching rule is
    used; the tensor's kind follows after a dot:

        "layers.{layer}.self_attn.qkv": "model.layers.{layer}.self_attn.{part}"
        "layers.{layer}.mlp.experts": "model.layers.{layer}.mlp.experts.{expert}.{part}"

    aliases: (other prefix, prefix in the rules), replaced in order in the checkpoint's names.
    ignored: patterns (`fnmatch`) of tensors that are not loaded.
    packed: tensors that are split before they are loaded.
    """

    rules: Mapping[str, str]
    aliases: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = field(default=())
    packed: tuple[Packed, ...] = ()

    def module_name(self, path: str, part: str = "", expert: int | None = None) -> str:
        """Return the checkpoint's module for our module `path`. Raises ValueError if no rule matches, or if the
        arguments do not match the rule's holes {part} and {expert}."""
        template, wanted, numbers = self._rule(path)
        holes = dict(numbers)
        if part:
            holes["part"] = part
        if expert is not None:
            holes["expert"] = str(expert)
        if wanted - holes.keys() or ({"part", "expert"} & holes.keys()) - wanted:
            raise ValueError(f"name map: {template!r} does not fit {path}, part {part!r}, expert {expert}")
        return template.format_map(holes)

    def packed_name(self, path: str, part: str = "", expert: int | None = None) -> str:
        """Return `module_name`, or the packed module that contains it."""
        return self._holder(self.module_name(path, part, expert))

    def _holder(self, module: str) -> str:
        return next((name for packed in self.packed if (name := packed.holder(module)) is not None), module)

    def in_checkpoint(self, tensor: str) -> str:
        """Return the checkpoint's name of a rule's tensor, or of the tensor that contains it."""
        whole = next((name for packed in self.packed if (name := packed.holding(tensor)) is not None), None)
        module, _, kind = tensor.rpartition(".")
        return f"{self._holder(module)}.{kind}" if whole is None else whole

    def _rule(self, path: str) -> tuple[str, Set[str], Mapping[str, str]]:
        """Return the first matching rule: the checkpoint's name, its holes, and the holes that the path fills. Cached,
        because a layer of experts has a thousand names."""
        if path not in self._rules_by_path:
            for pattern, template in self._patterns:
                match = pattern.fullmatch(path)
                if match is not None:
                    self._rules_by_path[path] = template, frozenset(_HOLE.findall(template)), match.groupdict()
                    break
            else:
                raise ValueError(f"name map: no rule for {path}; there are {', '.join(self.rules)}")
        return self._rules_by_path[path]

    @cached_property
    def _rules_by_path(self) -> dict[str, tuple[str, Set[str], Mapping[str, str]]]:
        return {}

    def tensor_name(self, path: str, key: WeightKey) -> str:
        """Return the checkpoint's tensor for a key of our module `path`. Raises ValueError as `module_name`."""
        return f"{self.module_name(path, key.part, key.expert)}.{key.kind}"

    def canonical(self, name: str) -> str:
        """Convert a tensor name of the checkpoint to the spelling of the rules."""
        for prefix, ours in self.aliases:
            if name.startswith(prefix):
                name = ours + name.removeprefix(prefix)
        return _KV_SCALE.sub(r".kv_scales.\1", name)

    def canonical_module(self, module: str) -> str:
        """Convert a module name of the checkpoint to the spelling of the rules."""
        return self.canonical(f"{module}.").removesuffix(".")

    def ignores(self, name: str) -> bool:
        """Whether the tensor of the canonical `name` is not loaded."""
        return any(fnmatchcase(name, pattern) for pattern in (*self.ignored, *_UNUSED))

    def pieces(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Split a tensor of the checkpoint, if it is packed, into (canonical name, tensor) pairs. Raises
        WrongTensorError if its shape does not fit."""
        name = self.canonical(name)
        candidates = (packed.pieces(name, tensor) for packed in self.packed)
        return next((pieces for pieces in candidates if pieces is not None), [(name, tensor)])

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], str]]:
        return [(_pattern(path), name) for path, name in self.rules.items()]


def decoder_names(
    layer_rules: Callable[[str, str], dict[str, str]],
    tie_embeddings: bool,
    prefix: str = "model",
    aliases: tuple[tuple[str, str], ...] = (),
    ignored: Iterable[str] = (),
    packed: tuple[Packed, ...] = (),
) -> NameMap:
    """Return the names of a decoder: embedding, layers, norm and head. Besides `ignored`, it ignores rotary frequencies
    of old checkpoints, and a vocabulary head that repeats a tied embedding.

    layer_rules: (path of a layer, its name in the checkpoint) -> rules.
    prefix: prefix of all names but the head's.
    """
    return NameMap(
        layer_rules("layers.{layer}", f"{prefix}.layers.{{layer}}")
        | {"lm_head": "lm_head", "embed_tokens": f"{prefix}.embed_tokens", "norm": f"{prefix}.norm"},
        aliases=aliases,
        ignored=("*.rotary_emb.inv_freq", *ignored, *(("lm_head.weight",) if tie_embeddings else ())),
        packed=packed,
    )


# Modules of models of images, sound and text that no text needs.
_TOWERS = (
    *("vision_tower", "vision_model", "vision_embedder", "visual", "embed_vision"),
    *("audio_tower", "embed_audio", "multi_modal_projector"),
)
_TEXT_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)


def text_part_names(names: NameMap) -> NameMap:
    """Return a decoder's names also for the models of images and text that contain it."""
    towers = [f"{prefix}{tower}.*" for prefix in ("", "model.") for tower in _TOWERS]
    return replace(names, aliases=_TEXT_PREFIXES, ignored=(*names.ignored, *towers))


def split_rows(full: Tensor, sizes: Sequence[int], what: str) -> list[Tensor]:
    """Split a matrix into parts of sizes[i] rows, or its scales, each of which may cover several rows. what: name of
    the parts in errors."""
    unit, rest = divmod(sum(sizes), full.shape[0]) if full.dim() and full.shape[0] else (0, 1)
    if rest or any(size % unit for size in sizes):
        raise WrongTensorError(f"has shape {tuple(full.shape)}, which cannot be cut into {what} of {list(sizes)} rows")
    return list(torch.split(full, [size // unit for size in sizes]))
