"""Received tensors of one session, beside the running weights. Filled by a thread of
`aerie.workers.runner.transfer.session`."""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from aerie.workers.distributed.weight_transfer.wire import Announced, as_bytes
from aerie.workers.models.weights import CheckpointTensor
from aerie.workers.runner.transfer.receive_memory import HostTensor, ReceiveMemory
from aerie.workers.runner.weight_update import RunningModel

DRAFT_PREFIX = "draft."  # prefix of a draft's tensors in a target's session, as NeMo-RL sends them
_SOURCE = "the transfer"


class Staging:
    """Whole tensors by model.

    model: that the session is of, "target" or "draft". A target's session also takes the draft's tensors: names that
        begin with "draft.", and names of an MTP module in the target's checkpoint.
    memory: where the tensors are; empty.
    Raises ValueError if the engine has no such model.
    """

    def __init__(self, model: str, models: Mapping[str, RunningModel], memory: ReceiveMemory) -> None:
        if model not in models:
            raise ValueError(f"this engine has no {model} whose weights could be loaded")
        self.model = model
        self.num_bytes = 0
        self._models, self._memory = models, memory
        self._tensors: dict[str, dict[str, Tensor | HostTensor]] = {}
        self._missing: dict[str, tuple[str, ...]] = {}

    @property
    def models(self) -> tuple[str, ...]:
        """The models of which tensors are there."""
        return tuple(name for name in self._models if name in self._tensors)

    def uncovered(self) -> dict[str, tuple[str, ...]]:
        """Return the names of models of which no tensor is there."""
        models = [name for name in self._models if name not in self._tensors and self.model in ("target", name)]
        return {name: self._models[name].check_headers(()) for name in models}

    def check(self, tensors: Sequence[Announced]) -> None:
        """Check headers of further tensors. Raises ValueError, naming what does not fit; then no tensor is new."""
        by_model: dict[str, list[CheckpointTensor]] = {}
        for tensor in tensors:
            for model, name in self._places(tensor):
                if name in self._tensors.get(model, {}):
                    raise ValueError(f"{tensor.name} came twice in this session")
                by_model.setdefault(model, []).append(CheckpointTensor(name, tensor.header(), _SOURCE))
        for model, headers in by_model.items():
            lacked = set(self._models[model].check_headers(headers))
            before = self._missing.get(model)
            self._missing[model] = tuple(sorted(lacked) if before is None else (n for n in before if n in lacked))

    def add(self, tensor: Announced, received: Tensor) -> None:
        """Store a tensor that has been checked. received: its bytes. Raises ValueError for NaN and infinity."""
        self.num_bytes += tensor.num_bytes
        own = self._memory.take(tensor.shape, tensor.dtype)
        stored: Tensor | HostTensor
        if own is None:
            seen = received.clone().view(tensor.dtype).view(tensor.shape)  # a copy, since views need alignment
            stored = HostTensor.of(seen)
        else:
            if tensor.num_bytes:
                as_bytes(own).copy_(received)
            stored = seen = own
        for model, name in self._places(tensor):
            self._models[model].check_values((CheckpointTensor(name, seen, _SOURCE),))
            self._tensors.setdefault(model, {})[name] = stored

    def read(self, model: str) -> Iterable[CheckpointTensor]:
        """Yield a model's tensors, on the device if they fit."""
        for name, stored in self._tensors[model].items():
            tensor = stored.on(self._memory.device) if isinstance(stored, HostTensor) else stored
            yield CheckpointTensor(name, tensor, _SOURCE)

    def missing(self, model: str) -> tuple[str, ...]:
        """Return a model's names of which no tensor has come. Raises ValueError if none has come at all."""
        if model not in self._tensors:
            raise ValueError(f"no tensor of the {model} has come in this session")
        return self._missing[model]

    def _places(self, tensor: Announced) -> list[tuple[str, str]]:
        """Return the models that the tensor is of, and its name in each. Raises ValueError."""
        if self.model == "target" and tensor.name.startswith(DRAFT_PREFIX):
            if "draft" not in self._models:
                raise ValueError(f"{tensor.name}: this engine has no draft whose weights could be loaded")
            return [("draft", tensor.name.removeprefix(DRAFT_PREFIX))]
        places = [(self.model, tensor.name)]
        draft = self._models.get("draft")
        if self.model == "target" and draft is not None and self._is_ignored(tensor):
            header = CheckpointTensor(tensor.name, tensor.header(), _SOURCE)
            places += [("draft", tensor.name)] if draft.wants(header) else []
        return places

    def _is_ignored(self, tensor: Announced) -> bool:
        names = self._models["target"].names
        return names.ignores(names.canonical(tensor.name))
