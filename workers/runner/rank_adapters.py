"""A rank's adapters: all of them in host memory, as many as `LoraConfig.max_loras` in the layers' tables. Built by
`aerie.workers.runner.build`; the scheduler decides which are where (`aerie.workers.scheduling.adapters`)."""

import time
from collections.abc import Sequence

from torch import Tensor, nn

from aerie.kernels.lora.product import LoraTables
from aerie.kernels.to_device import pinned
from aerie.workers.config import LoraConfig
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.lora.adapter_file import AdapterNames, LayerMatrices, read_layers
from aerie.workers.lora.layers import AdaptedMethod, AdapterRows, allocate_tables, checked_layers, padded_rank
from aerie.workers.models.name_map import NameMap
from aerie.workers.runner.commands import CommandHandlers
from aerie.workers.runner.graphs.step_capture import on_any_rank
from aerie.workers.scheduling.commands.command import LoadAdapter, LoadedAdapter, UnloadAdapter


class RankAdapters:
    """Adapters by number. Their layers' methods become `AdaptedMethod`s.

    row_index: for `TargetRunner`.
    """

    def __init__(
        self, model: nn.Module, names: NameMap, config: LoraConfig, of_slot: Tensor, group: TPGroup, title: str
    ) -> None:
        """model: finished. names: the checkpoint's names of its tensors. of_slot: see `AdapterRows`. title: names the
        model in errors. Raises ValueError if adapters cannot change any layer of it, or one of `config.modules` does
        not fit."""
        layers = checked_layers(model, title)
        self._max_rank = config.max_lora_rank
        self.row_index = AdapterRows(of_slot)
        self._names = AdapterNames(layers, names)
        self._group, self._device = group, of_slot.device
        self._host: dict[int, dict[str, LayerMatrices]] = {}
        self._tables: dict[str, LoraTables] = {}
        rank = padded_rank(config.max_lora_rank)
        for path, layer in layers.items():
            tables = allocate_tables(layer.shape, config.max_loras, rank, layer.method.dtype, self._device)
            layer.method = AdaptedMethod(layer.method, tables, self.row_index)
            self._tables[path] = tables
        for number, (name, folder) in enumerate(config.modules.items()):
            try:
                self._read(number, folder)
            except ValueError as error:
                raise ValueError(f"lora.modules.{name}: {error}") from None

    def register(self, handlers: CommandHandlers) -> None:
        """Carry out the commands of adapters."""
        handlers.add(LoadAdapter, self.load)
        handlers.add(UnloadAdapter, self.unload)

    def load(self, work: LoadAdapter) -> LoadedAdapter:
        """Read an adapter to host memory. Raises ValueError, and nothing has changed, if a rank refuses it."""
        began_s = time.perf_counter()
        refusal: Exception | None = None
        try:
            rank = self._read(work.number, work.path)
        except Exception as error:  # such as a file that cannot be read, or no memory
            refusal = error
        if on_any_rank(refusal is not None, self._group, self._device):
            self._host.pop(work.number, None)
            raise refusal or ValueError("another rank refused this adapter")
        return LoadedAdapter(rank, time.perf_counter() - began_s)

    def unload(self, work: UnloadAdapter) -> LoadedAdapter:
        """Free an adapter's host memory."""
        self._host.pop(work.number, None)
        return LoadedAdapter(0, 0.0)

    def place(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy adapters to places of the tables, after the steps launched so far. pairs: (number, place)."""
        for number, place in pairs:
            layers = self._host[number]
            for path, tables in self._tables.items():
                matrices = layers.get(path)
                if matrices is None:
                    tables.up[place].zero_()
                else:
                    tables.down[place].copy_(matrices.down, non_blocking=True)
                    tables.up[place].copy_(matrices.up, non_blocking=True)

    def _read(self, number: int, folder: str) -> int:
        """Read an adapter to host memory. Return its rank."""
        config, layers = read_layers(folder, self._names, self._tables, self._max_rank)
        self._host[number] = {
            path: LayerMatrices(pinned(each.down, self._device), pinned(each.up, self._device))
            for path, each in layers.items()
        }
        return config.max_rank
