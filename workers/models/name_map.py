"""`NameMap`: a family's declaration of what the checkpoint calls the tensors of its modules."""

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import Tensor

from workers.layers.weighted import WeightKey, WrongTensorError

_KIND = ".{kind}"
_HOLE = re.compile(r"\{(\w+)\}")
# Scales of KV in FP8, by the module that an exporter put them in: attention (compressed-tensors), a projection
# (ModelOpt), or one inside attention (vLLM). Ours: `workers.layers.kv_scales`.
_KV_SCALE = re.compile(r"(?:\.[kv]_proj|\.qkv_proj|\.attn)?\.([kv]_scale)$")
_UNUSED = ("*.q_scale",)  # queries keep their bits


@dataclass(frozen=True)
class Packed:
    """Tensors of the checkpoint that each hold several of those that the rules name.

    name: of such a tensor, with holes as in the rules.
    parts: what it holds, by the names that the rules give them; a hole is filled as in `name`.
    split: the whole tensor and its kind ("" where the name has none) -> its parts, in their order. Raises
    WrongTensorError where its shape does not fit.
    """

    name: str
    parts: tuple[str, ...]
    split: Callable[[Tensor, str], Sequence[Tensor]]

    def pieces(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]] | None:
        """The parts of tensor `name` and their names; None if it is no such tensor."""
        match = self._pattern.fullmatch(name)
        if match is None:
            return None
        names = [part.format_map(match.groupdict()) for part in self.parts]
        return list(zip(names, self.split(tensor, match.groupdict().get("kind", "")), strict=True))

    def holder(self, module: str) -> str | None:
        """The checkpoint's module that holds the part `module`; None if it holds none of that name. Of tensors whose
        names end with a kind; others belong to no module of the checkpoint."""
        matches = (pattern.fullmatch(module) for pattern in self._modules)
        match = next((each for each in matches if each is not None), None)
        return None if match is None else self.name.removesuffix(_KIND).format_map(match.groupdict())

    def holding(self, tensor: str) -> str | None:
        """The checkpoint's tensor that holds the part `tensor`; None if it holds none of that name. Of tensors whose
        names do not end with a kind."""
        starts = [0, *(i for i, letter in enumerate(tensor) if letter == ".")]
        found = (self._endings.get(tensor[start:]) for start in starts)
        matches = (pattern.fullmatch(tensor) for pattern in found if pattern is not None)
        match = next((each for each in matches if each is not None), None)
        return None if match is None else self.name.format_map(match.groupdict())

    @cached_property
    def _endings(self) -> dict[str, re.Pattern[str]]:
        """Return parts by the text after their last hole, since a layer of experts has hundreds of parts."""
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
    """Names of the checkpoint for our modules and keys. Loading a checkpoint uses the map backwards.

    rules: path of a module of ours -> the checkpoint's module. Both may have holes in braces: one in the path stands
    for one component and fills the same hole of the name; {part} and {expert} of the name are the key's. The first rule
    that fits a path is taken; the tensor's kind follows after a dot:

        "layers.{layer}.self_attn.qkv": "model.layers.{layer}.self_attn.{part}"
        "layers.{layer}.mlp.experts": "model.layers.{layer}.mlp.experts.{expert}.{part}"

    aliases: (prefix, ours) of names that some checkpoints spell otherwise, replaced one after the other.
    ignored: patterns (`fnmatch`) of names that a checkpoint may have and that are not loaded.
    packed: tensors that are taken apart before they are loaded.
    """

    rules: Mapping[str, str]
    aliases: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = field(default=())
    packed: tuple[Packed, ...] = ()

    def module_name(self, path: str, part: str = "", expert: int | None = None) -> str:
        """The checkpoint's module for our module `path`. Raises ValueError if no rule fits, or the rule needs a part or
        an expert that is not given, or does not tell those that are given apart."""
        template, wanted, found = self._rule(path)
        holes = dict(found)
        if part:
            holes["part"] = part
        if expert is not None:
            holes["expert"] = str(expert)
        if wanted - holes.keys() or ({"part", "expert"} & holes.keys()) - wanted:
            raise ValueError(f"name map: {template!r} does not fit {path}, part {part!r}, expert {expert}")
        return template.format_map(holes)

    def packed_name(self, path: str, part: str = "", expert: int | None = None) -> str:
        """`module_name`, or where that module is a part of a packed one, the latter's name."""
        return self._holder(self.module_name(path, part, expert))

    def _holder(self, module: str) -> str:
        return next((name for each in self.packed if (name := each.holder(module)) is not None), module)

    def in_checkpoint(self, tensor: str) -> str:
        """Return the checkpoint's name of a rule's tensor, or of the tensor that contains it."""
        whole = next((name for each in self.packed if (name := each.holding(tensor)) is not None), None)
        module, _, kind = tensor.rpartition(".")
        return f"{self._holder(module)}.{kind}" if whole is None else whole

    def _rule(self, path: str) -> tuple[str, Set[str], Mapping[str, str]]:
        """The name of the first rule that fits, its holes, and those that the path fills. Kept: a layer of experts has
        a thousand names."""
        if path not in self._found:
            for pattern, template in self._patterns:
                match = pattern.fullmatch(path)
                if match is not None:
                    self._found[path] = template, frozenset(_HOLE.findall(template)), match.groupdict()
                    break
            else:
                raise ValueError(f"name map: no rule for {path}; there are {', '.join(self.rules)}")
        return self._found[path]

    @cached_property
    def _found(self) -> dict[str, tuple[str, Set[str], Mapping[str, str]]]:
        return {}

    def tensor_name(self, path: str, key: WeightKey) -> str:
        """The checkpoint's tensor for a key of our module `path`; raises ValueError as `module_name` does."""
        return f"{self.module_name(path, key.part, key.expert)}.{key.kind}"

    def canonical(self, name: str) -> str:
        """A name of the checkpoint as the rules spell it."""
        for prefix, ours in self.aliases:
            if name.startswith(prefix):
                name = ours + name.removeprefix(prefix)
        return _KV_SCALE.sub(r".kv_scales.\1", name)

    def canonical_module(self, module: str) -> str:
        """A module's name in the checkpoint as the rules spell it."""
        return self.canonical(f"{module}.").removesuffix(".")

    def ignores(self, name: str) -> bool:
        """Whether the tensor of the canonical `name` is not loaded."""
        return any(fnmatchcase(name, pattern) for pattern in (*self.ignored, *_UNUSED))

    def pieces(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """The tensors that the checkpoint's tensor `name` is to our modules, with canonical names: as a rule itself.
        Raises WrongTensorError where it is packed and its shape does not fit."""
        name = self.canonical(name)
        found = (each.pieces(name, tensor) for each in self.packed)
        return next((pieces for pieces in found if pieces is not None), [(name, tensor)])

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], str]]:
        return [(_pattern(path), name) for path, name in self.rules.items()]


def split_rows(full: Tensor, sizes: Sequence[int], what: str) -> list[Tensor]:
    """Split a matrix into parts of sizes[i] rows, or its scales, if each is for several rows. what: for errors."""
    unit, rest = divmod(sum(sizes), full.shape[0]) if full.dim() and full.shape[0] else (0, 1)
    if rest or any(size % unit for size in sizes):
        raise WrongTensorError(f"has shape {tuple(full.shape)}, which cannot be cut into {what} of {list(sizes)} rows")
    return list(torch.split(full, [size // unit for size in sizes]))
