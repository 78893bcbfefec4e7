"""Loads weights of running models again, into the memory that they have, because CUDA graphs contain its addresses.

A source is checked first on all ranks, by the headers against the same model on the meta device and then by its values,
so that a refused source changes nothing. Carries out `LoadWeights`; built by `aerie.workers.runner.build`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.distributed.weight_transfer.wire import announced
from aerie.workers.layers.decoder_layer import DecoderLayer
from aerie.workers.layers.weighted import WeightedModule, WeightKey, WrongTensorError
from aerie.workers.models.name_map import NameMap
from aerie.workers.models.weights import CheckpointTensor, Fit, checkpoint_tensors, fill, wanted_tensors
from aerie.workers.runner.commands import InconsistentRankError
from aerie.workers.runner.graphs.step_capture import on_any_rank
from aerie.workers.scheduling.commands.command import (
    Folder,
    LoadedWeights,
    LoadWeights,
    Staged,
    Tensors,
)

META = torch.device("meta")
CPU = torch.device("cpu")
_MAX_OPEN = 8  # modules whose weights may be there twice: one layer's matrices
Read = Callable[[torch.device], Iterable[CheckpointTensor]]  # yields the tensors of a source, or only headers on "meta"


@dataclass
class RunningModel:
    """A loaded model on one rank.

    title: names it in errors.
    make_twin: builds it without weights, on the meta device.
    read_folder: yields the tensors of a folder, or only their headers on "meta".
    elsewhere: paths of modules whose weights come from another model.
    fixed: tensors of its checkpoints that no module loads and that cannot change, by canonical name.
    follow: called after the load of another model with its source; loads copies of that model's weights.
    """

    title: str
    model: nn.Module
    names: NameMap
    make_twin: Callable[[], nn.Module]
    read_folder: Callable[[str | Path, torch.device], Iterable[CheckpointTensor]] = checkpoint_tensors
    elsewhere: frozenset[str] = frozenset()
    fixed: dict[str, Callable[[Tensor], bool]] = field(default_factory=dict)
    follow: Callable[[Read], None] = lambda read: None

    @cached_property
    def _twin(self) -> nn.Module:
        return self.make_twin()

    @cached_property
    def _wanted(self) -> dict[str, tuple[WeightedModule, WeightKey]]:
        return wanted_tensors(self.model, self.names, self.elsewhere)

    def check(self, read: Read) -> tuple[str, ...]:
        """Check a source. Return the names of the model's tensors that it lacks. Raises ValueError, naming tensors that
        are unexpected, of another shape or dtype, not finite, or of a module that cannot be loaded again."""
        missing = self.check_headers(read(META))
        self.check_values(read(CPU))
        return missing

    def check_headers(self, headers: Iterable[CheckpointTensor]) -> tuple[str, ...]:
        """Do `check` for tensors on "meta"."""
        fit = fill(self._twin, self._without_fixed(headers), self.names, self.elsewhere)
        self._raise_problems(fit)
        return tuple(fit.missing)

    def check_values(self, tensors: Iterable[CheckpointTensor]) -> None:
        """Raise ValueError for values that cannot be loaded, of tensors whose headers are right."""
        self._raise_problems(Fit([], [], list(self._faults(tensors))))

    def wants(self, header: CheckpointTensor) -> bool:
        """Whether a module of this model loads the tensor, or a part of it."""
        if self.names.canonical(header.name) in self.fixed:
            return True
        return any(name in self._wanted for name, _ in self.names.pieces(header.name, header.tensor))

    def load(self, read: Read) -> None:
        """Load a source that has been checked."""
        wanted, opened = self._wanted, deque[WeightedModule]()
        for stored_name, whole, _ in self._without_fixed(read(CPU)):
            for name, tensor in self.names.pieces(stored_name, whole):
                if name in wanted:
                    module, key = wanted[name]
                    if module not in opened:
                        module.reopen()
                        opened.append(module)
                    module.load(key, tensor)
            while len(opened) > _MAX_OPEN:
                opened.popleft().reloaded()
        for child in self.model.modules():
            if isinstance(child, WeightedModule | DecoderLayer):
                child.reloaded()

    def _without_fixed(self, tensors: Iterable[CheckpointTensor]) -> Iterable[CheckpointTensor]:
        return (entry for entry in tensors if self.names.canonical(entry.name) not in self.fixed)

    def _faults(self, tensors: Iterable[CheckpointTensor]) -> Iterable[str]:
        """Yield a sentence for each tensor that does not fit this model."""
        wanted = self._wanted
        ignored = self.names.ignores
        for stored_name, whole, file in tensors:
            canonical = self.names.canonical(stored_name)
            if canonical in self.fixed:
                if not self.fixed[canonical](whole):
                    yield f"{stored_name} ({file}) differs from that of the running engine; start it again"
                continue
            for name, tensor in self.names.pieces(stored_name, whole):
                if name not in wanted:
                    if not ignored(name):
                        yield f"{stored_name} ({file}) is of a module that was joined with others"
                    continue
                module, key = wanted[name]
                try:
                    if module.reload_fault:
                        raise WrongTensorError(module.reload_fault)
                    module.check_values(key, tensor)
                except WrongTensorError as error:
                    yield f"{stored_name} ({file}) {error}"

    def _raise_problems(self, fit: Fit) -> None:
        if problems := fit.problems:
            raise ValueError(f"{self.title}: these weights cannot be loaded; {'; '.join(problems)}")


class StagedWeights(Protocol):
    """Received tensors: `aerie.workers.runner.transfer.session.WeightTransfer`."""

    def staged(self, model: str) -> tuple[Read, tuple[str, ...]]:
        """Return a model's checked tensors, on any device, and the names that they lack. Raises ValueError if there are
        none."""

    def loaded(self) -> None:
        """End the session, after the tensors were loaded."""


class WeightUpdate:
    """The handler of `LoadWeights`.

    models: the engine's models by name, "target" first.
    """

    def __init__(
        self, models: Mapping[str, RunningModel], group: TPGroup, device: torch.device, transfer: StagedWeights
    ) -> None:
        self._models, self._group, self._device, self._transfer = models, group, device, transfer

    def __call__(self, work: LoadWeights) -> LoadedWeights:
        """Load weights. Raises ValueError, and nothing has changed, if a rank refuses; InconsistentRankError if loading
        fails after that."""
        began_s = time.perf_counter()
        reads, missing = dict[str, Read](), dict[str, tuple[str, ...]]()
        refusal: Exception | None = None
        try:
            for name, source in work.sources.items():
                model = self._model(name)
                if isinstance(source, Staged):
                    reads[name], missing[name] = self._transfer.staged(name)
                else:
                    reads[name] = self._read(model, source)
                    missing[name] = model.check(reads[name])
        except Exception as error:  # such as a file that cannot be read, or no memory
            refusal = error
        if on_any_rank(refusal is not None, self._group, self._device):
            raise refusal or ValueError("another rank refused these weights")
        try:
            for name, read in reads.items():
                self._models[name].load(read)
                for other in self._models.values():
                    if other is not self._models[name]:
                        other.follow(read)
            if any(isinstance(source, Staged) for source in work.sources.values()):
                self._transfer.loaded()
        except Exception as error:
            raise InconsistentRankError(f"weights were loaded in part: {error}") from error
        return LoadedWeights(missing, time.perf_counter() - began_s)

    def _model(self, name: str) -> RunningModel:
        if name not in self._models:
            raise ValueError(f"this engine has no {name} whose weights could be loaded")
        return self._models[name]

    def _read(self, model: RunningModel, source: Folder | Tensors) -> Read:
        if isinstance(source, Folder):
            return partial(model.read_folder, source.path)
        return partial(_tensors, source)


def _tensors(source: Tensors, device: torch.device) -> Iterable[CheckpointTensor]:
    for entry in source.tensors:
        tensor = tensor_of(entry.name, entry.dtype, entry.shape, entry.data, device)
        yield CheckpointTensor(entry.name, tensor, "the message")


def tensor_of(name: str, dtype: str, shape: Sequence[int], data: bytes, device: torch.device) -> Tensor:
    """Return the tensor of a message, on the CPU, or only its header on "meta". Raises ValueError, naming it, if dtype
    or size are wrong."""
    (header,) = announced((name,), (dtype,), (shape,))
    if len(data) != header.num_bytes:
        raise ValueError(f"{name}: {len(data)} bytes of data; {dtype} {tuple(shape)} takes {header.num_bytes}")
    if device == META:
        return header.header()
    if not data:
        return torch.empty(header.shape, dtype=header.dtype)
    return torch.frombuffer(bytearray(data), dtype=header.dtype).view(header.shape)
