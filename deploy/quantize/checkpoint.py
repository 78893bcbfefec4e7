"""`aerie quantize`: reads, checks, measures, converts, and measures again."""

import argparse
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from aerie.cluster.config import ConfigError
from aerie.deploy.config.hub import model_folder
from aerie.deploy.quantize.calibration import SHIPPED, Moments, Observed, mean_loss, moments_bytes, read_texts, reader
from aerie.deploy.quantize.matrices import Layer, Source, chosen_layers, largest, unquantised_modules
from aerie.deploy.quantize.names import SCHEMES
from aerie.deploy.quantize.rounding import ShardWriter, copy_others, quantised, unfinished
from aerie.deploy.quantize.schemes import Scheme, scheme_of
from aerie.speculative.training import TrainingError
from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.models.loading import fill_target, read_target_config
from aerie.workers.models.weights import META
from aerie.workers.runner.memory import HostMemory

ResultT = TypeVar("ResultT")
_MOMENTS_BYTES = 1 << 32  # second moments held at once; for more, the texts are read again


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """The result of a run.

    num_matrices: quantised matrices.
    bytes_before, bytes_after: bytes of the weights.
    loss_before, loss_after: nats per token on held-out text; None if not measured.
    num_tokens: number of tokens of that text.
    """

    num_matrices: int
    bytes_before: int
    bytes_after: int
    loss_before: float | None
    loss_after: float | None
    num_tokens: int


def run(arguments: argparse.Namespace) -> int:
    """Write the checkpoint and print sizes and losses. Raises ConfigError, TrainingError."""
    try:
        made = quantise(arguments)
    except (ConfigError, TrainingError):
        raise
    except ValueError as error:  # the engine's
        raise ConfigError(str(error)) from None
    print(f"{arguments.output}: {arguments.scheme}, {made.num_matrices} matrices quantised")
    print(f"weights         {made.bytes_before / 1e9:.3f} GB -> {made.bytes_after / 1e9:.3f} GB")
    if made.loss_before is not None and made.loss_after is not None:
        change = f"{made.loss_after - made.loss_before:+.4f}, {made.num_tokens} tokens"
        print(f"held-out loss   {made.loss_before:.4f} -> {made.loss_after:.4f} nats a token ({change})")
    return 0


def quantise(arguments: argparse.Namespace) -> QuantizedCheckpoint:
    """Write the checkpoint. Raises ConfigError, TrainingError, and ValueError like an engine."""
    scheme = scheme_of(arguments.scheme, arguments.group_size, arguments.asymmetric, bool(arguments.calibrate))
    if arguments.head and not SCHEMES[scheme.name].is_integer:
        raise ConfigError(f"--head: {scheme.name} leaves the vocabulary head in 16 bits; leave it out, or take w4a16")
    source = Source(model_folder(arguments.model, None))
    layers = chosen_layers(source, arguments.ignore, arguments.head, scheme.weights.group_size or 1)
    return Job(source, scheme, layers, arguments).run()


class Job:
    """One run of the command. arguments: parsed command line."""

    def __init__(self, source: Source, scheme: Scheme, layers: list[Layer], arguments: argparse.Namespace) -> None:
        self.source, self.scheme, self.layers, self.arguments = source, scheme, layers, arguments
        self.modules = {module for layer in layers for module in layer.modules}
        self.output: Path = arguments.output.expanduser().absolute()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, console=Console(stderr=True), transient=True)

    def run(self) -> QuantizedCheckpoint:
        """Write the checkpoint to an unfinished folder, check that it loads, and measure the loss before and after."""
        texts = self._held_out()
        with unfinished(self.output) as folder, self.progress:
            self._check_space()
            copy_others(self.source.folder, folder, self.scheme.config(unquantised_modules(self.source, self.modules)))
            read_target_config(ModelSource(str(folder)), 1)  # refuses unsupported models before the work
            before = self._loss(self.source.folder, texts, "loss before")
            writer = ShardWriter(folder, int(self.arguments.shard_gb * 1e9))
            self._convert(writer)
            writer.finish()
            fill_target(ModelSource(str(folder)), read_target_config(ModelSource(str(folder)), 1), SOLO, META, 1)
            after = self._loss(folder, texts, "loss after")
        num_tokens = sum(len(text) - 1 for text in texts)
        return QuantizedCheckpoint(
            len(self.modules),
            self.source.num_bytes,
            bytes_after=writer.num_bytes,
            loss_before=before,
            loss_after=after,
            num_tokens=num_tokens,
        )

    def _held_out(self) -> list[list[int]]:
        """Return the texts for the loss; empty if it is not measured."""
        arguments = self.arguments
        needed, free = 4 * self.source.num_weights, HostMemory().free()
        if needed > free:
            what = f"{needed / 1e9:.1f} GB of memory in float32, and {free / 1e9:.1f} GB are free"
            if arguments.calibrate:
                raise ConfigError(f"--calibrate: the model needs {what}; leave it out, or take a larger machine")
            if arguments.loss:
                print(f"the loss is not measured: the model needs {what}")
            return []
        if not arguments.loss:
            return []
        return self._texts(arguments.loss_text or [str(SHIPPED)], arguments.loss_rows)

    def _texts(self, sources: Sequence[str], num_rows: int) -> list[list[int]]:
        longest = min(self.arguments.max_length, self.source.config.max_position - 1)
        return read_texts(self.source.folder, sources, num_rows, longest)

    def _check_space(self) -> None:
        """Raise ConfigError if the disk lacks space for the smallest possible result."""
        unquantised = [entry for entry in self.source.entries.values() if entry.module not in self.modules]
        least = sum(torch.Size(entry.shape).numel() * entry.dtype.itemsize for entry in unquantised)
        mine = [self.source.by_module[module] for module in self.modules]
        least += sum(torch.Size(entry.shape).numel() for entry in mine) * self.scheme.weights.num_bits // 8
        free = shutil.disk_usage(self.output.parent).free
        if least > free:
            raise ConfigError(
                f"--output {self.output}: needs {least / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; free some "
                "space, or name a folder on another disk"
            )

    def _loss(self, folder: Path, texts: list[list[int]], what: str) -> float | None:
        if not texts:
            return None
        with reader(folder, max(map(len, texts))) as engine:
            return mean_loss(engine, texts, self._bar(what, len(texts)))

    def _bar(self, what: str, total: int) -> Callable[[], None]:
        task = self.progress.add_task(what, total=total)
        return lambda: self.progress.advance(task)

    def _convert(self, writer: ShardWriter) -> None:
        """Write all tensors: the quantised ones in the order of layers, then the others."""
        advance = self._bar(f"{self.scheme.name}", len(self.layers))
        for layers, moments in self._batches():
            for tensors in in_order(partial(self._quantised, moments), layers):
                writer.add(tensors)
                advance()
        for entry in self.source.entries.values():
            if entry.module not in self.modules:
                writer.add({entry.name: self.source.read(entry).clone()})

    def _batches(self) -> Iterator[tuple[list[Layer], Moments]]:
        """Yield layers with their inputs' second moments, in batches of up to `_MOMENTS_BYTES`."""
        moments = Moments()
        if not self.arguments.calibrate:
            yield self.layers, moments
            return
        texts = self._texts(self.arguments.calibrate, self.arguments.calibration_rows)
        with reader(self.source.folder, max(map(len, texts)), lambda c: replace(c, quant=Observed(moments))) as engine:
            for layers in in_batches(self.layers, _MOMENTS_BYTES):
                moments.begin({layer.observed for layer in layers})
                mean_loss(engine, texts, self._bar("calibration", len(texts)))
                yield layers, moments

    def _quantised(self, moments: Moments, layer: Layer) -> dict[str, Tensor]:
        """Return a layer's tensors by their names in the files."""
        entries = [self.source.by_module[module] for module in layer.modules]
        weights = [self.source.read(entry) for entry in entries]
        magnitude = max(map(largest, weights))
        seen = moments.take(layer.observed)
        stored: dict[str, Tensor] = {}
        for entry, weight in zip(entries, weights, strict=True):
            module = entry.name.removesuffix(".weight")
            tensors = quantised(weight, self.scheme, magnitude, seen)
            stored |= {f"{module}.{kind}": tensor for kind, tensor in tensors.items()}
        return stored


def in_order(function: Callable[[Layer], ResultT], layers: Iterable[Layer]) -> Iterator[ResultT]:
    """Yield `function` of each layer, in order. One thread per core computes them, because there are many matrices and
    each is small. At most that many layers are in memory."""
    num_threads = os.cpu_count() or 1
    running: deque[Future[ResultT]] = deque()
    with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        try:
            for layer in layers:
                if len(running) >= num_threads:
                    yield running.popleft().result()
                running.append(threads.submit(function, layer))
            while running:
                yield running.popleft().result()
        finally:  # after an error or Ctrl-C
            threads.shutdown(cancel_futures=True)


def in_batches(layers: Sequence[Layer], max_bytes: int) -> Iterator[list[Layer]]:
    """Split layers into batches whose second moments fit into `max_bytes`; a batch has at least one layer."""
    batch: list[Layer] = []
    held: dict[str, int] = {}
    for layer in layers:
        more = held | {layer.observed: moments_bytes(layer.columns)}
        if batch and sum(more.values()) > max_bytes:
            yield batch
            batch, more = [], {layer.observed: moments_bytes(layer.columns)}
        batch.append(layer)
        held = more
    if batch:
        yield batch
