"""Loads safetensors or GGUF files into parameters: finds the module of each tensor, which loads its shard, and reports
missing, unexpected and wrong tensors. On the meta device it reads headers only, to check a checkpoint before a start
(`aerie.speculative.build.check_weights`). Also counts memory and formats of weights for the log and `aerie plan`."""

import json
import os
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from aerie.kernels.capability import Capability
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.workers.layers.latent_attention import LatentUpProjection
from aerie.workers.layers.linear import LinearBase
from aerie.workers.layers.linear_method import UnquantizedLinearMethod
from aerie.workers.layers.moe import Experts
from aerie.workers.layers.weighted import WeightedModule, WeightKey, WeightMethod, WrongTensorError
from aerie.workers.models.gguf.tensors import gguf_tensors, is_gguf_folder, read_index
from aerie.workers.models.name_map import NameMap

INDEX = "model.safetensors.index.json"
_NAMED_IN_ERRORS = 4  # maximum tensors that an error names
_READ_AHEAD = 256 << 20  # bytes; more gains little, and evicts other pages if memory is short
_READ_STEP = 8 << 20  # bytes per request
_CPU = torch.device("cpu")
_RANK_SEEDS = 1 << 20  # between the seeds of the ranks' dummy weights: more than callers add to a seed
Advance = Callable[[int, int], None]  # (bytes loaded, bytes of all files)
# PyTorch's dtypes by their names in safetensors headers.
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class CheckpointTensor(NamedTuple):
    """A whole tensor of a checkpoint. name: its name there. file: name of the file that contains it."""

    name: str
    tensor: Tensor
    file: str


def checkpoint_tensors(folder: str | Path, device: torch.device = _CPU) -> Iterator[CheckpointTensor]:
    """Yield every tensor of the folder's safetensors files, or of the GGUF file that it stands for, on the CPU. Files
    are memory-mapped, so a rank reads only what it copies.

    device: "meta" yields shapes and dtypes of the headers; only lists of integers, such as a draft's token ids, have
        values.
    Raises ValueError, naming the file, if there are no files, the index names a missing one, or one cannot be read.
    """
    if is_gguf_folder(folder):
        yield from (CheckpointTensor(*entry) for entry in gguf_tensors(folder, device))
        return
    files = checkpoint_files(folder)
    ahead = _ReadAhead(files) if Capability.of(device).has_memory else None
    for path in files:
        with opened(path, device) as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                tensor = _read(file, name, device, path)
                if ahead is not None:
                    ahead.take(tensor.nbytes)
                yield CheckpointTensor(name, tensor, path.name)


class _ReadAhead:
    """Asks the kernel to read files into the page cache before their tensors are copied. Page faults of a memory map
    read small pieces sequentially.

    Measured with 4 GB on disk, a cold page cache and 2 busy cores: 5.4 to 9.4 s without, 4.1 to 4.8 s with it.
    runai-model-streamer 0.17, 16 threads: 4.2 to 5.8 s, and twice as long as a memory map with a warm page cache.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._parts = [(path, path.stat().st_size) for path in reversed(files)]  # remaining parts, the next one last
        self._start = 0  # start of the next part in its file
        self._ahead = 0  # bytes requested and not taken yet; negative if headers were not counted

    def take(self, num_bytes: int) -> None:
        """Request more bytes, after `num_bytes` were read."""
        self._ahead -= num_bytes
        while self._parts and self._ahead <= _READ_AHEAD - _READ_STEP:
            path, size = self._parts[-1]
            length = min(_READ_STEP, size - self._start)
            with suppress(OSError), path.open("rb", buffering=0) as file:  # `opened` reports files that cannot be read
                os.posix_fadvise(file.fileno(), self._start, length, os.POSIX_FADV_WILLNEED)
            self._ahead += length
            self._start += length
            if self._start == size:
                self._parts.pop()
                self._start = 0


def counted(tensors: Iterable[CheckpointTensor], folder: str | Path, advance: Advance) -> Iterator[CheckpointTensor]:
    """Yield `tensors`, and call `advance` after each. Dequantised tensors are larger than in the files."""
    total, taken = num_checkpoint_bytes(folder), 0
    for entry in tensors:
        yield entry
        taken += entry.tensor.nbytes
        advance(min(taken, total), total)


def _read(file: Any, name: str, device: torch.device, path: Path) -> Tensor:
    """Read a tensor of a safetensors file. On the meta device, only its shape, but for scalars, whose values are
    needed."""
    header = file.get_slice(name)
    dtype = _TYPES.get(header.get_dtype())
    if dtype is None:
        raise ValueError(f"{path}: {name} is of type {header.get_dtype()}, which is not supported; convert it to BF16")
    if not Capability.of(device).has_memory:
        is_weight = dtype.is_floating_point or len(header.get_shape()) > 1
        return torch.empty(header.get_shape(), dtype=dtype, device=device) if is_weight else torch.tensor(header[:])
    tensor: Tensor = file.get_tensor(name)
    return tensor


@contextmanager
def opened(path: Path, device: torch.device = _CPU) -> Iterator[Any]:
    """Open a safetensors file, whose header is checked against its length. Raises ValueError that names the file.

    device: "meta" opens it for numpy arrays, because PyTorch would reserve memory for the whole file.
    """
    try:
        file = safe_open(str(path), framework="pt" if Capability.of(device).has_memory else "np")
    except SafetensorError as error:
        raise ValueError(f"{path}: is cut off or damaged ({error}); download it again") from None
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    with file:
        yield file


def checkpoint_files(folder: str | Path) -> list[Path]:
    """Return the files of a checkpoint's weights: safetensors, those that its index names if it has one, by name; or
    GGUF."""
    folder = Path(folder)
    if is_gguf_folder(folder):
        return [Path(path) for path in read_index(folder).paths]
    index = folder / INDEX
    if index.exists():
        names = sorted(set(_weight_map(index).values()))
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise ValueError(f"path={folder}: lacks {first_names(missing)}, named in {index.name}; download it again")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"path={folder}: has no *.safetensors; convert the checkpoint, or set load_format: dummy")
    if dangling := [path.name for path in files if not path.exists()]:
        raise ValueError(f"path={folder}: {first_names(dangling)} links to a file that is missing; download it again")
    # Mistral AI's repositories have the weights a second time, under its own names.
    return [path for path in files if not path.name.startswith("consolidated")] or files


def num_checkpoint_bytes(folder: str | Path) -> int:
    """Return the size of a checkpoint's files. Raises ValueError as `checkpoint_files`."""
    return sum(path.stat().st_size for path in checkpoint_files(folder))


def modules_with_weight(folder: str | Path) -> frozenset[str]:
    """Return the checkpoint's names of modules that have a tensor `weight`; empty without files."""
    folder = Path(folder)
    index = folder / INDEX
    names: list[str] = []
    if is_gguf_folder(folder):
        names = [tensor.name for tensor in read_index(folder).tensors]
    elif index.exists():
        names = list(_weight_map(index))
    else:
        for path in sorted(folder.glob("*.safetensors")):
            with opened(path, torch.device("meta")) as file:
                names += file.keys()
    return frozenset(name.removesuffix(".weight") for name in names if name.endswith(".weight"))


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor. Raises ValueError that names the index."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{index}: is not JSON ({error}); download it again") from None
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"{index}: has no weight_map from tensors to files; download it again")
    return files


def load_weights(
    model: nn.Module,
    tensors: Iterable[CheckpointTensor],
    names: NameMap,
    source: str,
    elsewhere: Set[str] = frozenset(),
) -> None:
    """Fill the parameters of `model` from a checkpoint's whole tensors.

    source: names the checkpoint in errors.
    elsewhere: paths of modules whose weights come from elsewhere.
    Raises ValueError naming tensors, and their files, that are missing, unexpected, or of another shape or dtype.
    """
    fit = fill(model, tensors, names, elsewhere)
    problems = [f"missing: {first_names(fit.missing)}"] if fit.missing else []
    if problems := problems + fit.problems:
        raise ValueError(f"{source}: the checkpoint does not fit its config.json; {'; '.join(problems)}")


class Fit(NamedTuple):
    """How tensors fit a model. missing: names of tensors that it also needs. unexpected: names, with their files, that
    it does not have. wrong: names with the fault."""

    missing: list[str]
    unexpected: list[str]
    wrong: list[str]

    @property
    def problems(self) -> list[str]:
        """Return the unexpected names and those with wrong tensors, for an error message."""
        by_fault = {"unexpected": self.unexpected, "wrong": self.wrong}
        return [f"{what}: {first_names(which)}" for what, which in by_fault.items() if which]


def fill(
    model: nn.Module, tensors: Iterable[CheckpointTensor], names: NameMap, elsewhere: Set[str] = frozenset()
) -> Fit:
    """Fill parameters of `model` from whole tensors, and return how they fit. Arguments: see `load_weights`."""
    wanted = wanted_tensors(model, names, elsewhere)
    loaded: set[str] = set()
    unexpected, wrong = [], []
    for stored_name, whole, file in tensors:
        try:
            pieces = names.pieces(stored_name, whole)
        except WrongTensorError as error:
            wrong.append(f"{stored_name} ({file}) {error}")
            continue
        for name, tensor in pieces:
            if name not in wanted:
                if not names.ignores(name) and not _is_unused_bias(name, tensor, wanted):
                    unexpected.append(f"{stored_name} ({file})")
                continue
            module, key = wanted[name]
            if name in loaded:
                wrong.append(f"{stored_name} ({file}) is there twice")
            loaded.add(name)
            try:
                module.load(key, tensor)
            except WrongTensorError as error:
                wrong.append(f"{stored_name} ({file}) {error}")
    missing = [n for n, (module, key) in wanted.items() if n not in loaded and not module.fill_missing(key)]
    return Fit(list(dict.fromkeys(map(names.in_checkpoint, missing))), unexpected, wrong)


def _is_unused_bias(name: str, tensor: Tensor, wanted: Container[str]) -> bool:
    """Return whether the tensor is a zero bias that AutoGPTQ stores for layers without a bias."""
    module, _, kind = name.rpartition(".")
    return (
        kind == "bias"
        and f"{module}.qweight" in wanted
        and (not Capability.of(tensor.device).has_memory or not bool(tensor.any()))
    )


def wanted_tensors(
    model: nn.Module, names: NameMap, elsewhere: Set[str]
) -> dict[str, tuple[WeightedModule, WeightKey]]:
    """Return the module and key of each checkpoint tensor that is loaded. elsewhere: see `load_weights`."""
    wanted: dict[str, tuple[WeightedModule, WeightKey]] = {}
    for path, module in weighted_modules(model):
        for key in () if path in elsewhere else module.weight_keys():
            name = names.tensor_name(path, key)
            assert name not in wanted, f"the name map gives {name} to two modules"
            wanted[name] = module, key
    return wanted


def weighted_modules(model: nn.Module) -> list[tuple[str, WeightedModule]]:
    """Return the modules with weights, by path. Every parameter must belong to one, because others would stay
    uninitialised."""
    named = [(path, module) for path, module in model.named_modules() if isinstance(module, WeightedModule)]
    owned = {parameter for _, module in named for parameter in module.parameters()}
    orphans = [name for name, parameter in model.named_parameters() if parameter not in owned]
    assert not orphans, f"no WeightedModule loads {orphans}"
    return named


def first_names(names: list[str]) -> str:
    """Return the first names, and the number of further ones, for an error."""
    rest = len(names) - _NAMED_IN_ERRORS
    return ", ".join(names[:_NAMED_IN_ERRORS]) + (f" and {rest} more" if rest > 0 else "")


def fill_dummy(model: nn.Module, seed: int, rank: int = 0) -> None:
    """Fill the model with small random weights, for benchmarks. Replicated modules are equal on all ranks. Shards
    differ, because equal partial sums would be added without rounding, and the best tokens of two shards would tie."""
    device = next(model.parameters()).device
    replicated, own = (
        torch.Generator(device).manual_seed(number) for number in (seed, seed + _RANK_SEEDS * (rank + 1))
    )
    for _, module in weighted_modules(model):
        module.fill_dummy(own if module.is_sharded else replicated)


META = torch.device("meta")


def weight_bytes(model: nn.Module, multiplies_fp8: bool, without: tuple[str, ...] = ()) -> int:
    """Return the bytes of a model's weights on a GPU.

    model: a model on the meta device, see `aerie.workers.models.loading.allocate`.
    multiplies_fp8: whether the device multiplies FP8, so that FP8 weights stay FP8 if possible.
    without: modules shared with another model.
    """
    options = GEMMOptions(fp8=multiplies_fp8, packed=True)
    absorbed = replace(options, fp8=False, packed=False)  # MLA multiplies these per head, in the model's dtype
    total = 0
    for path, module in model.named_modules():
        if f"{path}.".startswith(tuple(f"{other}." for other in without)):
            continue
        if isinstance(module, LinearBase | Experts):
            total += module.method.num_bytes(absorbed if isinstance(module, LatentUpProjection) else options)
    methods = {
        id(tensor) for module in model.modules() if isinstance(module, WeightMethod) for tensor in module.parameters()
    }
    named = (*model.named_parameters(), *model.named_buffers())
    others = [tensor for name, tensor in named if not name.startswith(tuple(f"{prefix}." for prefix in without))]
    return total + sum(tensor.nbytes for tensor in others if id(tensor) not in methods)


def weight_formats(model: nn.Module) -> str:
    """Return formats and numbers of layers, such as "int4 in groups of 128 (144), unquantised (1)"; "" if all layers
    are unquantised. The experts of a layer count as one."""
    counts: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, LatentUpProjection) and not isinstance(module.method, UnquantizedLinearMethod):
            counts[f"{module.method.format}, dequantised"] += 1  # multiplied head by head
        elif isinstance(module, LinearBase | Experts) and module.method.kinds:  # a tied head has none
            counts[module.method.format] += 1
    if set(counts) <= {"unquantised"}:
        return ""
    return ", ".join(f"{name} ({count})" for name, count in counts.most_common())
