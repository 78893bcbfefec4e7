"""`NameMap`: a family's declaration of what the checkpoint calls the tensors of its modules."""

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property

from workers.layers.weighted import WeightKey

_HOLE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class NameMap:
    """From our modules and keys to names of the checkpoint, which is read off backwards when it is loaded.

    rules: path of a module of ours -> the checkpoint's module. Both may have holes in braces: one in the path stands
    for one component and fills the same hole of the name; {part} and {expert} of the name are the key's. The first rule
    that fits a path is taken; the tensor's kind follows after a dot:

        "layers.{layer}.self_attn.qkv": "model.layers.{layer}.self_attn.{part}"
        "layers.{layer}.mlp.experts": "model.layers.{layer}.mlp.experts.{expert}.{part}"

    aliases: (prefix, ours) of names that some checkpoints spell otherwise, replaced one after the other.
    ignored: patterns (`fnmatch`) of names that a checkpoint may have and nobody loads.
    """

    rules: Mapping[str, str]
    aliases: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = field(default=())

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
        return name

    def ignores(self, name: str) -> bool:
        """Whether nobody loads the canonical `name`."""
        return any(fnmatchcase(name, pattern) for pattern in self.ignored)

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], str]]:
        def pattern(path: str) -> str:
            pieces = _HOLE.split(path)  # text, hole, text, hole, ..., text
            return "".join(f"(?P<{piece}>[^.]+)" if i % 2 else re.escape(piece) for i, piece in enumerate(pieces))

        return [(re.compile(pattern(path)), name) for path, name in self.rules.items()]
