"""Checkpoints larger than memory: `aerie quantize` and the loader hold a small part of a checkpoint at a time. Measured
is anonymous memory, the part of a process that must stay in memory: mapped pages of files are dropped where others need
them. Each case is a process of its own, whose allocator has no free memory of earlier tests."""

import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aerie.deploy.cli import main
from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.models.loading import fill_target, read_target_config
from aerie.workers.models.weights import INDEX, num_checkpoint_bytes
from tests.support import ROOT
from tests.support.replica import Dimensions, write_config

SIZE = Dimensions(256, 8, 8, 32, 1024, 512, 64, 1)
NUM_LAYERS = 64
SHARE = 8  # ranks, of which the loader fills one
LAYERS_PER_FILE = 16


def write_checkpoint(folder: Path, num_layers: int) -> Path:
    """A Llama of 2.1 MB per layer, 16 layers per file."""
    target = write_config(folder, dataclasses.replace(SIZE, layers=num_layers), max_position=64) / "target"
    generator, files = torch.Generator().manual_seed(0), dict[str, str]()

    def save(file: str, shapes: dict[str, tuple[int, ...]]) -> None:
        made = {n: torch.randn(shape, generator=generator).mul_(0.02).bfloat16() for n, shape in shapes.items()}
        save_file(made, str(target / file))
        files.update(dict.fromkeys(made, file))

    square, wide, tall = (SIZE.hidden, SIZE.hidden), (SIZE.mlp, SIZE.hidden), (SIZE.hidden, SIZE.mlp)
    matrices = dict.fromkeys((f"self_attn.{name}_proj" for name in "qkvo"), square)
    matrices |= {"mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": tall}
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (SIZE.hidden,))
    for first in range(0, num_layers, LAYERS_PER_FILE):
        layers = range(first, min(num_layers, first + LAYERS_PER_FILE))
        shapes = {f"model.layers.{i}.{name}.weight": s for i in layers for name, s in (matrices | norms).items()}
        save(f"layers-{first}.safetensors", shapes)
    ends = {"model.embed_tokens.weight": (SIZE.vocab, SIZE.hidden), "lm_head.weight": (SIZE.vocab, SIZE.hidden)}
    save("ends.safetensors", {**ends, "model.norm.weight": (SIZE.hidden,)})
    (target / INDEX).write_text(json.dumps({"weight_map": files}))
    return target


def anonymous_bytes() -> int:
    """Memory of this process that belongs to no file."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def peak_growth(run: Callable[[], object]) -> int:
    """Bytes by which anonymous memory grows at most while `run` runs, seen every two milliseconds."""
    before = peak = anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    return max(peak, anonymous_bytes()) - before


def quantise(folder: Path) -> dict[str, float]:
    """`aerie quantize` without the loss, which needs the whole model; after a small one, which imports libraries."""

    def run(what: Path) -> None:
        options = ["--scheme", "fp8", "--no-loss", "--shard-gb", "0.005", "--output", str(what / "out")]
        assert main(["quantize", str(what / "target"), *options]) == 0

    write_checkpoint(folder / "small", 8)
    run(folder / "small")
    target = write_checkpoint(folder, NUM_LAYERS)
    grown = peak_growth(lambda: run(folder))
    return {"grown": grown, "whole": num_checkpoint_bytes(target), "made": num_checkpoint_bytes(folder / "out")}


def load(folder: Path) -> dict[str, float]:
    """The shard of one of eight ranks; on a GPU it would lie elsewhere."""
    folder = write_checkpoint(folder, NUM_LAYERS)
    source = ModelSource(str(folder), device="cpu")
    config, shard = read_target_config(source, SHARE), 0

    def run() -> None:
        nonlocal shard
        model = fill_target(source, config, TPGroup(0, SHARE), torch.device("cpu"), 64)
        shard = sum(parameter.nbytes for parameter in model.parameters())

    grown = peak_growth(run)
    return {"grown": grown - shard, "whole": num_checkpoint_bytes(folder), "made": shard}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("what,most", [("quantise", 0.45), ("load", 0.1)])
def test_a_checkpoint_passes_through_little_memory(what: str, most: float, tmp_path: Path) -> None:
    """quantise: 5 MB of a file, and matrices of a layer per thread with their copies in float32, of 134 MB; as much for
    twice the layers. load: nothing beside the shard, so that a GPU's host may have a tenth of the checkpoint free."""
    code = (
        f"import json, pathlib, runpy; run = runpy.run_path({__file__!r})[{what!r}]; "
        f"print(json.dumps(run(pathlib.Path({str(tmp_path)!r}))))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["grown"] < most * found["whole"], found
    assert found["made"] > 0.1 * found["whole"]
