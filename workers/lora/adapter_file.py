"""Reads an adapter's folder: which matrices it has for which layers of this rank. Nothing is kept of a folder that does
not fit. Used by `aerie.workers.runner.rank_adapters`."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aerie.kernels.experts.adapted.product import ExpertLoraTables
from aerie.kernels.lora.product import LoraTables
from aerie.workers.layers.linear import LinearBase
from aerie.workers.layers.linear_method import Part
from aerie.workers.layers.vocab import VocabEmbedding
from aerie.workers.layers.weighted import WrongTensorError
from aerie.workers.lora.adapter_config import MERGE, MODULE_PREFIX, WEIGHTS_FILE, AdapterConfig, read_adapter_config
from aerie.workers.lora.base_copies import BaseCheckpoint
from aerie.workers.lora.expert_file import ExpertNames
from aerie.workers.lora.layers import EMBEDDING, HEAD, adaptable_layers
from aerie.workers.lora.matrices import LayerMatrices, Matrices, check_matrices, check_scaled
from aerie.workers.models.name_map import NameMap
from aerie.workers.models.weights import opened

DRAFT_PREFIX = "draft."  # of the paths of a draft's layers beside the target's
_MATRIX = re.compile(r"(?P<module>.+)\.lora_((?P<side>[AB])(?:\.[^.]+)?\.weight|embedding_(?P<of>[AB])(?:\.[^.]+)?)")
_WHOLE = re.compile(r"(?P<module>.+?)(?:\.base_layer)?\.weight")
_OTHER_NAMES = {"model.unembed_tokens": HEAD, "unembed_tokens": HEAD}  # of the head, in adapters of Tinker
_NAMED_IN_ERRORS = 4  # maximum tensors that an error names
_UNSERVED = "is of a layer that adapters cannot change here"


class AdapterNames:
    """Finds the layers of the modules that an adapter names.

    layers: layers that adapters may change, by path in our model; a draft's paths begin with `DRAFT_PREFIX`.
    names: the checkpoint's names of the model's tensors.
    experts: routed experts, that adapters may or may not change.
    base: the model's checkpoint; None for a draft.
    """

    def __init__(
        self,
        layers: Mapping[str, LinearBase | VocabEmbedding],
        names: NameMap,
        experts: ExpertNames | None = None,
        base: BaseCheckpoint | None = None,
    ) -> None:
        self.layers = layers
        self.experts = experts or ExpertNames({}, names, False)
        self._names = names
        self._base = base
        self._parts_by_name = {
            names.module_name(path.removeprefix(DRAFT_PREFIX), part.name): (path, part)
            for path, layer in layers.items()
            for part in layer.shape.parts
        }

    @classmethod
    def of_draft(cls, model: nn.Module, names: NameMap) -> "AdapterNames":
        """Return a draft's layers."""
        return cls({f"{DRAFT_PREFIX}{path}": layer for path, layer in adaptable_layers(model).items()}, names)

    @property
    def served(self) -> str:
        """The last components of the names of modules that adapters may change, for errors."""
        return ", ".join(sorted({name.rpartition(".")[2] for name in self._parts_by_name}))

    def _canonical(self, module: str) -> str:
        name = self._names.canonical_module(module)
        return _OTHER_NAMES.get(name, name)

    def copy_fault(self, module: str, copy: Any) -> str:
        """Return why an adapter cannot have this whole weight of a module; "" if it repeats the base's. copy:
        `get_slice` of safetensors."""
        name = self._canonical(module)
        path, part = self._parts_by_name.get(name, ("", None))
        if part is None or self._base is None or path not in (EMBEDDING, HEAD):
            return f"is not a matrix of an adapter; {MERGE}"
        if path == EMBEDDING:
            return self._base.copy_fault([name], copy, part.columns, part.rows.total)
        return self._base.copy_fault([name, self._names.module_name(EMBEDDING)], copy, part.rows, part.columns.total)

    def parts(self, module: str, up: Tensor) -> list[tuple[str, Part, Tensor]]:
        """Return for each part of a module its layer's path, the part, and its rows of the module's B; several if the
        checkpoint stacks matrices. Raises WrongTensorError."""
        name = self._canonical(module)
        if name in self._parts_by_name:
            return [(*self._parts_by_name[name], up)]
        pieces = [(piece.removesuffix(".weight"), rows) for piece, rows in self._names.pieces(f"{module}.weight", up)]
        if not all(piece in self._parts_by_name for piece, _ in pieces):
            raise WrongTensorError(_UNSERVED)
        return [(*self._parts_by_name[piece], rows) for piece, rows in pieces]


def read_layers(
    folder: str | Path,
    names: AdapterNames,
    tables: Mapping[str, LoraTables],
    expert_tables: Mapping[str, ExpertLoraTables],
    max_rank: int,
) -> dict[str, LayerMatrices]:
    """Read an adapter's folder, and return this rank's matrices by path of layer.

    tables: tables of all layers that adapters may change, by path; only their shapes and dtype are read.
    expert_tables: the same of products of routed experts.
    max_rank: `LoraConfig.max_lora_rank`.
    Raises ValueError, naming tensors and remedy, if the adapter is damaged or does not fit.
    """
    config, faults = read_adapter_config(folder), list[str]()
    if config.max_rank > max_rank:
        raise ValueError(f"adapter {folder}: has rank {config.max_rank}, above max_lora_rank={max_rank}; raise that")
    layers: dict[str, LayerMatrices] = {}
    for module, matrices in adapter_modules(Path(folder), config, faults, names.copy_fault):
        try:
            if names.experts.write(layers, expert_tables, module, matrices, config):
                continue
            check_matrices(matrices, config.rank_of(module))
            for path, part, rows in names.parts(module, matrices.up):
                if path not in layers:
                    layers[path] = _empty(tables[path])
                _write(layers[path], tables[path], names.layers[path], part, matrices, rows)
        except WrongTensorError as error:
            faults.append(f"{module} {error}")
    if faults:
        more = f" and {len(faults) - _NAMED_IN_ERRORS} more" if len(faults) > _NAMED_IN_ERRORS else ""
        is_unserved = any(fault.endswith(_UNSERVED) for fault in faults)
        remedy = f"; they may change {names.served}; for others, {MERGE}" if is_unserved else ""
        raise ValueError(f"adapter {folder}: does not fit; {'; '.join(faults[:_NAMED_IN_ERRORS])}{more}{remedy}")
    if not layers:
        raise ValueError(f"adapter {folder}: {WEIGHTS_FILE} has no matrices")
    return layers


def adapter_modules(
    folder: Path, config: AdapterConfig, faults: list[str], copy_fault: Callable[[str, Any], str]
) -> Iterator[tuple[str, Matrices]]:
    """Yield the modules of an adapter's file. Adds a text to `faults` for each tensor that is no matrix of an adapter,
    or lacks its other matrix.

    copy_fault: returns the fault of a module's whole weight: see `AdapterNames.copy_fault`.
    """
    path = folder / WEIGHTS_FILE
    if not path.exists():
        raise ValueError(f"adapter {folder}: {_without_weights(folder)}")
    with opened(path) as file:
        tensors: dict[str, dict[str, str]] = {}
        for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
            if match := _MATRIX.fullmatch(name):
                sides, side = tensors.setdefault(match["module"], {}), match["side"] or match["of"]
                if side in sides:
                    faults.append(f"{name} is a second lora_{side} of its module; save one adapter to a file")
                sides[side] = name
            elif match := _WHOLE.fullmatch(name):
                if fault := copy_fault(match["module"].removeprefix(MODULE_PREFIX), file.get_slice(name)):
                    faults.append(f"{name} {fault}")
            else:
                faults.append(f"{name} is not a matrix of an adapter; {MERGE}")
        for module, sides in tensors.items():
            base = module.removeprefix(MODULE_PREFIX)
            if missing := {"A", "B"} - sides.keys():
                faults.append(f"{base} has no lora_{missing.pop()}")
                continue
            yield base, Matrices(file.get_tensor(sides["A"]), file.get_tensor(sides["B"]), config.scale_of(base))


def _without_weights(folder: Path) -> str:
    """Return what is wrong with a folder that lacks the weights' file, and the remedy."""
    others = sorted(path.name for path in folder.glob("adapter*") if path.suffix in (".bin", ".safetensors"))
    if others and others[0].endswith(".bin"):
        return f"has no {WEIGHTS_FILE}, but {others[0]}; save it with safe_serialization=True: pickles are not read"
    but = f", but {others[0]}" if others else ""
    return f"has no {WEIGHTS_FILE}{but}; save it with peft's save_pretrained, in one file"


def _empty(tables: LoraTables) -> LayerMatrices:
    return LayerMatrices(*(torch.zeros(table.shape[1:], dtype=table.dtype) for table in (tables.down, tables.up)))


def _write(
    into: LayerMatrices,
    tables: LoraTables,
    layer: LinearBase | VocabEmbedding,
    part: Part,
    matrices: Matrices,
    rows: Tensor,
) -> None:
    """Copy this rank's share of one part. rows: the part's rows of B. Raises WrongTensorError."""
    rank, columns = matrices.down.shape[0], part.columns
    if matrices.down.shape[1] != columns.total:
        raise WrongTensorError(f"(lora_A) has shape {tuple(matrices.down.shape)}, the layer has {columns.total} inputs")
    if rows.shape[0] != part.rows.total:
        raise WrongTensorError(f"(lora_B) has shape {tuple(rows.shape)}, the layer has {part.rows.total} outputs")
    first = layer.shape.parts.index(part) * tables.max_rank
    into.down[first : first + rank] = matrices.down[:, columns.first : columns.end]
    up = into.up[part.offset : part.offset + part.rows.size, :rank]
    up.copy_(rows[part.rows.first : part.rows.end].float() * matrices.scale)
    check_scaled(up, matrices.scale)
