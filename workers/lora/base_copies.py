"""Whole weights of embedding and vocabulary head in adapters' files. peft saves the base's beside their matrices
(`save_embedding_layers`); an adapter is served if they repeat those of the base's checkpoint."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aerie.kernels.span import Span
from aerie.workers.config import ModelSource
from aerie.workers.lora.adapter_config import MERGE
from aerie.workers.models.gguf.tensors import is_gguf_folder
from aerie.workers.models.name_map import NameMap
from aerie.workers.models.weights import checkpoint_files, opened

_BLOCK_ROWS = 4096  # rows that are compared at a time
_ROUNDING, _SMALLEST = 2.0**-8, 1e-7  # relative and absolute: of bfloat16 and float16, which copies may have
_UNTRAINED = "if it was not trained, save the adapter with save_embedding_layers=False"


@dataclass(frozen=True)
class BaseCheckpoint:
    """The base's checkpoint, whose weights adapters may repeat.

    folder: the base's; None if it has random weights, so that only shapes are compared.
    """

    folder: str | None
    names: NameMap

    @classmethod
    def of(cls, source: ModelSource, names: NameMap) -> "BaseCheckpoint":
        """names: the checkpoint's names of the model's tensors."""
        return cls(None if source.load_format == "dummy" else source.path, names)

    def copy_fault(self, modules: Sequence[str], copy: Any, rows: Span, width: int) -> str:
        """Return what an adapter's whole weight differs in, and the remedy; "" if it repeats the base's.

        modules: canonical names of the base's module, and of one that has its weight if they are tied.
        copy: `get_slice` of safetensors.
        rows: rows of this rank, which are compared.
        width: columns of the weight.
        Raises ValueError if the base's file cannot be read.
        """
        shape = tuple(copy.get_shape())
        if shape != (rows.total, width):
            return f"has shape {shape}, the base's is {(rows.total, width)}: embeddings of new tokens, {MERGE}"
        if self.folder is None:
            return ""
        repeats = self._repeats(modules, copy, rows)
        if repeats is None:
            return f"cannot be compared with the base's, which is quantised; {_UNTRAINED}"
        return "" if repeats else f"differs from the base's weight, and whole weights are not served; {MERGE}"

    def _repeats(self, modules: Sequence[str], copy: Any, rows: Span) -> bool | None:
        """Return whether the copy's rows are the base's; None if these are not numbers."""
        for base in self._weights(modules):
            for first in range(rows.first, rows.end, _BLOCK_ROWS):
                last = min(first + _BLOCK_ROWS, rows.end)
                ours, theirs = base[first:last], copy[first:last]
                if not ours.is_floating_point() or ours.itemsize < 2 or ours.shape != theirs.shape:
                    return None
                if not is_copy(theirs, ours):
                    return False
            return True
        return None

    def _weights(self, modules: Sequence[str]) -> Iterator[Any]:
        """Yield slices of the modules' weights that the checkpoint has, in the modules' order."""
        assert self.folder is not None
        if is_gguf_folder(self.folder):
            return
        for module in modules:
            for path in checkpoint_files(self.folder):
                with opened(path) as file:
                    for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                        if self.names.canonical(name) == f"{module}.weight":
                            yield file.get_slice(name)


def is_copy(copy: Tensor, base: Tensor) -> bool:
    """Return whether all numbers of `copy` are those of `base`, but for rounding to another type of 16 bits or more."""
    copy, base = copy.float(), base.float()
    return bool(((copy - base).abs() <= _SMALLEST + _ROUNDING * base.abs()).all())
