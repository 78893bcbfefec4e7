"""safetensors -> parameters. Each module cuts its own share; this file finds the module, and counts what is missing,
what nobody knows and what does not fit."""

import json
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from workers.layers.weighted import WeightedModule, WeightKey, WrongTensorError
from workers.models.name_map import NameMap

_NAMED_IN_ERRORS = 4


def checkpoint_tensors(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor on the CPU) of every tensor in the folder's safetensors files, one at a time. The files are
    mapped: of a tensor of which a part is copied, that part is read.

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


def load_weights(
    model: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    names: NameMap,
    source: str,
    elsewhere: Set[str] = frozenset(),
) -> None:
    """Fill the parameters of `model` from a checkpoint's whole tensors. elsewhere: paths of modules that are filled by
    someone else. source: names the checkpoint in errors.

    Raises ValueError naming the tensors that are missing, not expected, or of another shape or type.
    """
    wanted = _wanted(model, names, elsewhere)
    loaded: set[str] = set()
    unexpected, wrong = [], []
    for given, tensor in tensors:
        name = names.canonical(given)
        if name not in wanted:
            if not names.ignores(name):
                unexpected.append(given)
            continue
        module, key = wanted[name]
        if name in loaded:
            wrong.append(f"{given} is there twice")
        loaded.add(name)
        try:
            module.load(key, tensor)
        except WrongTensorError as error:
            wrong.append(f"{given} {error}")
    missing = [n for n, (module, key) in wanted.items() if n not in loaded and not module.fill_missing(key)]
    found = {"missing": missing, "unexpected": unexpected, "wrong": wrong}
    problems = [f"{what}: {_few(which)}" for what, which in found.items() if which]
    if problems:
        raise ValueError(f"{source}: the checkpoint does not fit its config.json; {'; '.join(problems)}")


def _wanted(model: nn.Module, names: NameMap, elsewhere: Set[str]) -> dict[str, tuple[WeightedModule, WeightKey]]:
    """Who takes which tensor, by its name in the checkpoint."""
    wanted: dict[str, tuple[WeightedModule, WeightKey]] = {}
    for path, module in weighted_modules(model):
        for key in () if path in elsewhere else module.weight_keys():
            name = names.tensor_name(path, key)
            assert name not in wanted, f"the name map gives {name} to two modules"
            wanted[name] = module, key
    return wanted


def weighted_modules(model: nn.Module) -> list[tuple[str, WeightedModule]]:
    """By path. Every parameter belongs to one, else it would keep whatever was in its memory."""
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, WeightedModule)]
    owned = {parameter for _, module in found for parameter in module.parameters()}
    orphans = [name for name, parameter in model.named_parameters() if parameter not in owned]
    assert not orphans, f"no WeightedModule loads {orphans}"
    return found


def _few(names: list[str]) -> str:
    rest = len(names) - _NAMED_IN_ERRORS
    return ", ".join(names[:_NAMED_IN_ERRORS]) + (f" and {rest} more" if rest > 0 else "")


def fill_dummy(model: nn.Module, seed: int) -> None:
    """Small random weights, for benchmarks: the same on every rank for replicated parameters."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for _, module in weighted_modules(model):
        module.fill_dummy(generator)
