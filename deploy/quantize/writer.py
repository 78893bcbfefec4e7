"""Writes a checkpoint's folder shard by shard under a temporary name, and renames it at the end."""

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from aerie.cluster.config import ConfigError
from aerie.workers.models.weights import INDEX

_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


@contextlib.contextmanager
def unfinished(output: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `output` at the end of the context, or removed after an exception.
    Raises ConfigError if `output` exists."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output}: is there already; remove it, or name another folder")
    folder = output.with_name(f".{output.name}.unfinished")
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        raise ConfigError(f"{folder}: is left of a run that was killed, or another one is writing; remove it") from None
    try:
        yield folder
        if output.is_dir():
            output.rmdir()
        folder.rename(output)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


class ShardWriter:
    """Collects tensors up to `max_bytes`, then writes them to a file.

    folder: has a config.json, whose permissions the files get.
    num_bytes: written so far.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._names: list[list[str]] = []
        self.num_bytes = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Add a tensor. Raises ConfigError if a file cannot be written."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._waiting and self._waiting_bytes + size > self._max_bytes:
            self._flush()
        self._waiting.update(tensors)
        self._waiting_bytes += size

    def _flush(self) -> None:
        path = self._folder / f"{len(self._names)}.safetensors"
        try:
            save_file(self._waiting, str(path), {"format": "pt"})
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{path}: cannot be written ({error}); free some space, or set --output elsewhere"
            ) from None
        shutil.copymode(self._folder / "config.json", path)  # safetensors makes it readable by its owner only
        self._names.append(list(self._waiting))
        self.num_bytes += self._waiting_bytes
        self._waiting, self._waiting_bytes = {}, 0

    def finish(self) -> None:
        """Write the remaining tensors, name the files, and write the index if there are several."""
        if self._waiting:
            self._flush()
        count = len(self._names)
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._names):
            file = f"model-{i + 1:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"
            (self._folder / f"{i}.safetensors").rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            content = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
            (self._folder / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True))


def copy_others(source: Path, folder: Path, quantization: Mapping[str, Any]) -> None:
    """Copy the tokenizer, templates and other files, and write config.json with the quantization_config."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name != "config.json" and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    text = json.dumps(config | {"quantization_config": dict(quantization)}, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
