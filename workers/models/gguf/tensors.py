"""Reads the weights of a GGUF file, whose list of tensors `aerie.workers.models.gguf.folder` wrote into a folder. Its
tensors have the names and values of Hugging Face's checkpoints."""

import dataclasses
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from aerie.kernels.capability import Capability
from aerie.workers.models.gguf.families import StoredTensor
from aerie.workers.models.gguf.location import INDEX
from aerie.workers.quantization.block_scheme import BLOCK_TYPES, PLAIN_TYPES

_MXFP4 = "MXFP4"


class Weights(msgspec.Struct, frozen=True):
    """The tensors of a model in GGUF files.

    paths: absolute, of the files that `StoredTensor.source` numbers.
    sizes: in bytes.
    """

    paths: list[str]
    sizes: list[int]
    tensors: list[StoredTensor]


class ReadTensor(NamedTuple):
    name: str
    tensor: Tensor
    file: str


def is_gguf_folder(folder: str | Path) -> bool:
    return (Path(folder) / INDEX).is_file()


def read_index(folder: str | Path) -> Weights:
    """Read the list of tensors. Raises ValueError if files have changed or are missing since it was written."""
    path = Path(folder) / INDEX
    try:
        weights = msgspec.json.decode(path.read_bytes(), type=Weights)
        sizes = [Path(file).stat().st_size for file in weights.paths]
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path}: {error}; start again from the *.gguf file") from None
    if sizes != weights.sizes:
        raise ValueError(f"{weights.paths[0]}: has changed since {path} was written; start again from the file")
    return weights


def gguf_tensors(folder: str | Path, device: torch.device, dense: bool = False) -> Iterator[ReadTensor]:
    """Yield every tensor, on the CPU; experts one by one. device: "meta" yields shapes and dtypes. dense: dequantise
    every tensor, also those that products take packed."""
    weights = read_index(folder)
    files = [_mapped(Path(path)) for path in weights.paths]
    for listed in weights.tensors:
        stored = dataclasses.replace(listed, packed=False) if dense else listed
        file = Path(weights.paths[stored.source.file]).name
        if Capability.of(device).has_memory:
            pairs = _named(stored, _value(stored, files[stored.source.file]))
        else:
            pairs = _named(stored, _shape_of(stored))
        for name, tensor in pairs:
            yield ReadTensor(name, tensor, file)


def _mapped(path: Path) -> Tensor:
    """Return a file's bytes, memory-mapped."""
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants memory that may be written
    return torch.frombuffer(content, dtype=torch.uint8)


def _value(stored: StoredTensor, file: Tensor) -> Tensor:
    """Return a tensor with the shape and the values of Hugging Face's checkpoint, from the file's bytes. Stays packed
    if `stored.packed`."""
    source = stored.source
    raw = file[source.offset : source.offset + source.num_bytes]
    if source.type in PLAIN_TYPES:
        tensor = raw.clone() if raw.data_ptr() % 16 else raw  # files align tensors, unless told otherwise
        tensor = tensor.view(PLAIN_TYPES[source.type]).view(source.shape)
    else:
        tensor = raw.view(*source.shape[:-1], BLOCK_TYPES[source.type].row_bytes(source.shape[-1]))
        if not stored.packed:
            tensor = BLOCK_TYPES[source.type].dequantize(tensor.flatten(0, -2)).view(source.shape)
    if stored.heads:
        tensor = _in_order(tensor, stored.heads)
    if stored.centred:
        tensor = tensor.float() - 1.0
    return tensor[None] if stored.is_row else tensor


def _in_order(rows: Tensor, heads: int) -> Tensor:
    """Undo the order of llama.cpp's RoPE: from pairs to halves, in each head."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _shape_of(stored: StoredTensor) -> Tensor:
    """Return an empty tensor on the meta device, with the shape and dtype that the loader will see."""
    source = stored.source
    shape, dtype = source.shape, PLAIN_TYPES.get(source.type, torch.float32)
    if stored.packed:
        shape, dtype = (*shape[:-1], BLOCK_TYPES[source.type].row_bytes(shape[-1])), torch.uint8
    if stored.is_row:
        shape = (1, *shape)
    return torch.empty(shape, dtype=torch.float32 if stored.centred else dtype, device="meta")


def _named(stored: StoredTensor, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a tensor of the file: one, or one or two of each expert."""
    if "{expert}" not in stored.name:
        yield stored.name, tensor
        return
    for expert, own in enumerate(tensor):
        name = stored.name.format(expert=expert)
        if stored.packed and stored.source.type == _MXFP4:
            module = name.removesuffix(".weight")
            yield f"{module}.blocks", _pairs(own)
            yield f"{module}.scales", own.view(own.shape[0], -1, BLOCK_TYPES[_MXFP4].num_bytes)[..., 0]
        else:
            yield name, own


def _pairs(raw: Tensor) -> Tensor:
    """Return MXFP4 codes as gpt-oss stores them, two neighbours a byte: [rows, blocks, 16] uint8. raw: rows of blocks,
    whose byte i has the codes i and i + 16."""
    codes = raw.view(raw.shape[0], -1, BLOCK_TYPES[_MXFP4].num_bytes)[..., 1:]
    codes = torch.cat((codes & 15, codes >> 4), -1)
    return codes[..., ::2] | codes[..., 1::2] << 4
