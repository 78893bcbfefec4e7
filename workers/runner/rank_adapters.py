"""A rank's adapters: all of them in host memory, as many as `LoraConfig.max_loras` in the layers' tables. Built by
`aerie.workers.runner.build`; the scheduler decides which are where (`aerie.workers.scheduling.adapters`)."""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from aerie.kernels.experts.adapted.product import ExpertLoraTables
from aerie.kernels.lora.product import VARIANT_ROWS, LoraTables
from aerie.kernels.to_device import pinned
from aerie.workers.config import LoraConfig
from aerie.workers.layers.latent_attention import LatentUpProjection
from aerie.workers.layers.linear import LinearBase
from aerie.workers.layers.moe import Experts
from aerie.workers.layers.vocab import LMHead, VocabEmbedding
from aerie.workers.lora.adapter_config import draft_folder
from aerie.workers.lora.adapter_file import AdapterNames, read_layers
from aerie.workers.lora.base_copies import BaseCheckpoint
from aerie.workers.lora.embedding import AdaptedEmbedding
from aerie.workers.lora.expert_file import ExpertNames
from aerie.workers.lora.experts import (
    DOWN,
    GATE_UP,
    AdaptedExperts,
    adapted_experts,
    allocate_expert_tables,
    experts_of,
    launch_adapted_experts,
)
from aerie.workers.lora.latent import LatentAdapters, allocate_latent_tables, launch_head_products
from aerie.workers.lora.layers import (
    AdaptedMethod,
    AdapterRows,
    allocate_tables,
    checked_layers,
    padded_rank,
)
from aerie.workers.lora.matrices import LayerMatrices
from aerie.workers.lora.shared_experts import launch_routed_experts
from aerie.workers.models.name_map import NameMap
from aerie.workers.runner.commands import CommandHandlers
from aerie.workers.scheduling.commands.command import AdapterReads, InspectAdapters, LoadAdapter, UnloadAdapter

logger = logging.getLogger(__name__)

Read = Mapping[str, LayerMatrices]  # one adapter's matrices by path of layer


class RankAdapters:
    """Adapters by number. Their layers' methods become `AdaptedMethod`s.

    row_index: the rows' adapters, for `TargetRunner`.
    """

    def __init__(
        self,
        model: nn.Module,
        base: BaseCheckpoint,
        config: LoraConfig,
        slot_table: Tensor,
        max_head_rows: int,
        title: str,
        is_fixed: bool = False,
    ) -> None:
        """
        model: finished.
        base: its checkpoint.
        slot_table, is_fixed: see `AdapterRows`.
        max_head_rows: maximum rows of the vocabulary head in any step.
        title: names the model in errors.
        Raises ValueError if adapters cannot change any layer of it, or one of `config.modules` does not fit.
        """
        layers = checked_layers(model, title)
        self.row_index = AdapterRows(slot_table, is_fixed, config.max_loras)
        self._max_head_rows = max_head_rows
        experts = ExpertNames(experts_of(model), base.names, config.experts)
        self._names = AdapterNames(layers, base.names, experts, base)
        self._draft_names: AdapterNames | None = None
        self._config, self._slot_table = config, slot_table
        self._device, self._model = slot_table.device, model
        self._host: dict[int, Read] = {}
        self._reads: dict[int, Future[Read]] = {}
        self._reader = ThreadPoolExecutor(1, "adapters")  # one: steps need the other cores
        self._tables: dict[str, LoraTables] = {}
        self._layers: list[LinearBase] = []
        self._expert_tables: dict[str, ExpertLoraTables] = {}
        self._embeddings: list[AdaptedEmbedding] = []
        self._adapt(layers, self.row_index)
        self._adapt_experts(adapted_experts(model, config, title))
        for number, (name, folder) in enumerate(config.modules.items()):
            try:
                self._host[number] = self._read(folder)
            except ValueError as error:
                raise ValueError(f"lora.modules.{name}: {error}") from None

    def adapt_draft(self, model: nn.Module, names: NameMap) -> AdapterRows:
        """Let adapters that have one for the draft change it, too. Return the index for the draft's runner. model,
        names: the draft's names, as for the target. Raises ValueError if one of `LoraConfig.modules` does not fit."""
        rows, self._draft_names = AdapterRows(self._slot_table), AdapterNames.of_draft(model, names)
        self._adapt(self._draft_names.layers, rows)
        for number, (name, folder) in enumerate(self._config.modules.items()):
            try:
                self._host[number] = {**self._host[number], **self._read_draft(folder)}
            except ValueError as error:
                raise ValueError(f"lora.modules.{name}: {error}") from None
        return rows

    def _adapt(self, layers: Mapping[str, LinearBase | VocabEmbedding], rows: AdapterRows) -> None:
        rank = padded_rank(self._config.max_lora_rank)
        for path, layer in layers.items():
            sizes = layer.shape, self._config.max_loras, rank, layer.dtype, self._device
            is_latent = isinstance(layer, LatentUpProjection)
            tables = allocate_latent_tables(*sizes) if is_latent else allocate_tables(*sizes, fixed=rows.is_fixed)
            self._tables[path] = tables
            if isinstance(layer, LatentUpProjection):
                layer.head_adapters = LatentAdapters(layer, tables, rows)
            elif isinstance(layer, VocabEmbedding):
                layer.adapters = AdaptedEmbedding(tables, rows)
                self._embeddings.append(layer.adapters)
            else:
                layer.method = AdaptedMethod(layer.method, tables, rows)
                self._layers.append(layer)

    def _adapt_experts(self, layers: Mapping[str, Experts]) -> None:
        rank = padded_rank(self._config.max_lora_rank)
        self._expert_tables = allocate_expert_tables(layers, self._config.max_loras, rank, self._device)
        for path, layer in layers.items():
            gate_up, down = (self._expert_tables[f"{path}.{product}"] for product in (GATE_UP, DOWN))
            layer.method = AdaptedExperts(layer.method, gate_up, down, self.row_index)

    @torch.inference_mode()
    def launch_kernels(self) -> None:
        """Launch all variants of the layers' kernels, with rows that have no adapter. A start calls it, so that no step
        compiles one; adapters loaded later use the same variants, whatever their rank."""
        distinct = {(type(layer), layer.shape, layer.bias is None, layer.method.dtype): layer for layer in self._layers}
        for layer in distinct.values():
            assert isinstance(layer.method, AdaptedMethod), "of `_adapt`"
            most = self._max_head_rows if isinstance(layer, LMHead) else max(VARIANT_ROWS)
            for num_rows in sorted({min(rows, most) for rows in VARIANT_ROWS}):
                layer.method.launch_kernels(num_rows, layer.bias)
        launch_routed_experts(self._model)
        launch_head_products(self._model)
        launch_adapted_experts(self._model, self.row_index)
        for embedding in self._embeddings:
            for num_rows in VARIANT_ROWS:
                embedding.launch_kernels(num_rows)

    def register(self, handlers: CommandHandlers) -> None:
        """Carry out the commands of adapters."""
        handlers.add(LoadAdapter, self.load)
        handlers.add(InspectAdapters, self.inspect)
        handlers.add(UnloadAdapter, self.unload)

    def load(self, work: LoadAdapter) -> AdapterReads:
        """Start to read an adapter."""
        self._reads[work.number] = self._reader.submit(self._read, work.path)
        return AdapterReads()

    def inspect(self, work: InspectAdapters) -> AdapterReads:
        """Take what has been read, and report it."""
        for number in work.numbers:
            if number in self._reads and self._reads[number].done() and self._reads[number].exception() is None:
                self._host[number] = self._reads.pop(number).result()
        failed = {number: _text(read.exception()) for number, read in self._reads.items() if read.done()}
        ended = dict.fromkeys(self._host, "") | failed
        return AdapterReads({number: ended[number] for number in work.numbers if number in ended})

    def unload(self, work: UnloadAdapter) -> AdapterReads:
        """Free an adapter's host memory."""
        self._host.pop(work.number, None)
        if work.number in self._reads:
            self._reads.pop(work.number).cancel()
        return AdapterReads()

    def place(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy adapters into the tables, after the steps launched so far. pairs: (number, index in the tables)."""
        for number, index in pairs:
            layers = self._host[number]
            every: dict[str, LoraTables | ExpertLoraTables] = {**self._tables, **self._expert_tables}
            for path, tables in every.items():
                matrices = layers.get(path)
                self.row_index.place(path, index, matrices is not None)
                if matrices is None:
                    tables.up[index].zero_()
                else:
                    tables.down[index].copy_(matrices.down, non_blocking=True)
                    tables.up[index].copy_(matrices.up, non_blocking=True)

    def _read(self, folder: str) -> Read:
        """Read an adapter to host memory. Raises ValueError if it does not fit."""
        return {**self._read_model(folder, self._names), **self._read_draft(folder)}

    def _read_draft(self, folder: str) -> Read:
        """Read an adapter's part for the draft, if both exist."""
        draft_path = draft_folder(folder)
        if self._draft_names is None or draft_path is None:
            return {}
        return self._read_model(draft_path, self._draft_names)

    def _read_model(self, folder: str | Path, names: AdapterNames) -> Read:
        read = read_layers(folder, names, self._tables, self._expert_tables, self._config.max_lora_rank)
        return {
            path: LayerMatrices(pinned(matrices.down, self._device), pinned(matrices.up, self._device))
            for path, matrices in read.items()
        }


def _text(error: BaseException | None) -> str:
    if not isinstance(error, ValueError):  # such as no memory
        logger.error("an adapter could not be read", exc_info=error)
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
