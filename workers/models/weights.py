"""safetensors -> parameters. Each layer cuts its own shard; this file only finds the layer and counts what is left."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from workers.layers.linear import ColumnLinear


def checkpoint_tensors(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor on the CPU) of every tensor in the folder's safetensors files, one at a time.

    Raises ValueError if there are none or an index names a file that is missing.
    """
    for path in checkpoint_files(folder):
        with safe_open(str(path), framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                yield name, file.get_tensor(name)


def checkpoint_files(folder: str | Path) -> list[Path]:
    """The safetensors files of a checkpoint, in the order of its index if it has one."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise ValueError(f"path={folder}: lacks {', '.join(missing)}, named in {index.name}; download it again")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"path={folder}: has no *.safetensors; convert the checkpoint, or set load_format: dummy")
    return files


def load_parameters(
    model: nn.Module,
    tensors: Iterator[tuple[str, Tensor]],
    source: str,
    strip: str = "",
    optional: frozenset[str] = frozenset(),
) -> None:
    """Fill every parameter of `model` from full tensors. strip: prefix dropped from checkpoint names.

    Raises ValueError naming what the checkpoint lacks, or holds and the model does not know (`optional` names may be
    left over, and parameters under them may be missing).
    """
    modules = dict(model.named_modules())
    loaded: set[str] = set()
    unknown = []
    for name, tensor in tensors:
        target = _find(modules, name.removeprefix(strip))
        if target is None:
            if not any(part in name for part in optional):
                unknown.append(name)
            continue
        module, part, kind, parameter = target
        module.load(part, kind, tensor)  # type: ignore[operator]
        loaded.add(parameter)
    wanted = _wanted(modules)
    missing = sorted(name for name in wanted - loaded if not any(part in name for part in optional))
    if missing or unknown:
        raise ValueError(
            f"{source}: the checkpoint does not fit its config.json; missing: {_few(missing)}; unknown: {_few(unknown)}"
        )


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more if names else "none"


def _find(modules: dict[str, nn.Module], name: str) -> tuple[nn.Module, str, str, str] | None:
    """(module, part, "weight" or "bias", canonical name) that takes the checkpoint tensor `name`."""
    path, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if path in modules and hasattr(modules[path], "load"):
        return modules[path], path, kind, name
    parent, _, part = path.rpartition(".")
    for child_name, child in _children(modules, parent):
        if isinstance(child, ColumnLinear) and part in child.parts:
            return child, part, kind, f"{child_name}/{part}.{kind}"
    return None


def _children(modules: dict[str, nn.Module], parent: str) -> Iterator[tuple[str, nn.Module]]:
    if parent in modules:
        for name, child in modules[parent].named_children():
            yield f"{parent}.{name}" if parent else name, child


def _wanted(modules: dict[str, nn.Module]) -> set[str]:
    wanted: set[str] = set()
    for name, module in modules.items():
        for kind, _ in module.named_parameters(recurse=False):
            if isinstance(module, ColumnLinear):
                wanted.update(f"{name}/{part}.{kind}" for part in module.parts)
            else:
                wanted.add(f"{name}.{'weight' if kind == 'own' else kind}")
    return wanted


def fill_dummy(model: nn.Module, seed: int) -> None:
    """Small random weights, for benchmarks: the same on every rank for replicated parameters."""
    generator: torch.Generator | None = None
    for parameter in model.parameters():
        generator = generator or torch.Generator(parameter.device).manual_seed(seed)
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.02, generator=generator)
        else:
            parameter.data.fill_(1.0)
