"""Makes the folder of a checkpoint that stands for a GGUF file: config.json, the tokenizer's files, and the list of
tensors. Everything that reads checkpoints reads this folder; the weights stay in the file."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from aerie.workers.models.gguf.families import StoredTensor, is_linear, read_config, stored_tensors
from aerie.workers.models.gguf.header import FileTensor, GgufFile, read_gguf
from aerie.workers.models.gguf.location import INDEX, Location, location_of
from aerie.workers.models.gguf.tensors import Weights
from aerie.workers.models.gguf.vocabulary import Vocabulary, write_vocabulary
from aerie.workers.quantization.block_scheme import BLOCK_TYPES, METHOD


def checkpoint_folder(path: Path, cache: Path, tokenizer: Path | None = None) -> Path:
    """Return the folder that stands for a GGUF file, written if it is missing. Arguments: as of `location_of`. Raises
    ValueError, in one line, if the file is missing, damaged, or not supported."""
    location = location_of(path, cache, tokenizer)
    if not location.is_written:
        write_folder(location)
    return location.folder


def write_folder(location: Location) -> None:
    """Write the folder, under another name first, so that it is complete or missing. Raises ValueError, in one line,
    for a file that is damaged or not supported."""
    file, folder = read_gguf(location.paths), location.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        config = read_config(file, lambda name: _vector(file, file.tensors[name]))
        tensors, quantization = _weights(file, config)
        if quantization:
            config["quantization_config"] = quantization
        if location.tokenizer:
            for tokenizer_file in location.tokenizer:
                shutil.copyfile(tokenizer_file, scratch / tokenizer_file.name)
        else:
            config["eos_token_id"] = Vocabulary(file.metadata, str(file.paths[0])).end_ids
            write_vocabulary(file.metadata, str(file.paths[0]), scratch, _dump)
        _dump(scratch / "config.json", config)
        sizes = [path.stat().st_size for path in file.paths]
        weights = Weights([str(path) for path in file.paths], sizes, tensors)
        (scratch / INDEX).write_bytes(msgspec.json.encode(weights))
        scratch.chmod(0o755)
        try:
            os.rename(scratch, folder)
        except OSError:
            if not location.is_written:  # else another process has written it meanwhile
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _dump(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def _vector(file: GgufFile, tensor: FileTensor) -> list[float]:
    if tensor.type != "F32":
        raise ValueError(f"{file.paths[0]}: {tensor.name} is {tensor.type}, not F32; use the model in safetensors")
    count = tensor.num_bytes // 4
    values: list[float] = np.fromfile(file.paths[tensor.file], "<f4", count, offset=tensor.offset).tolist()
    return values


def _weights(file: GgufFile, config: dict[str, Any]) -> tuple[list[StoredTensor], dict[str, Any] | None]:
    """Return the checkpoint's tensors, and its quantization_config."""
    experts = {tensor.type for tensor in file.tensors.values() if "_exps." in tensor.name and len(tensor.shape) == 3}
    if config["architectures"] == ["GptOssForCausalLM"] and experts == {"MXFP4"}:
        tensors = stored_tensors(file, config, lambda kind: kind == "MXFP4")
        return tensors, {"quant_method": "mxfp4"}
    tensors = stored_tensors(file, config, lambda kind: kind in BLOCK_TYPES and BLOCK_TYPES[kind].packed is not None)
    types: dict[str, list[str]] = {}
    for tensor in tensors:
        if tensor.source.type in BLOCK_TYPES and is_linear(tensor.name):
            types.setdefault(tensor.source.type, []).append(tensor.name.format(expert=0).removesuffix(".weight"))
    return tensors, {"quant_method": METHOD, "types": types} if types else None
