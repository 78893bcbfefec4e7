"""Milliseconds that steps wait for new weights, with dummy weights at 8B's dimensions.

    python -m tests.bench weight_updates [--model llama-3.1-8b] [--batch 32] [--updates 3] [--stage device host]
                                         [--gpus 2] [--tiny]

A batch runs while all weights of the target, then those of the draft, arrive and are switched. Printed for each: bytes
and seconds of the arrival, `took_s` of the switch, the gaps between results before, during and at the switch, whether
graphs were captured and whether any weight has moved. `--gpus 1`: tensors come from this process; 2: from a trainer on
the second GPU, over NCCL. `--stage host`: as if the GPU had no room. `--tiny` tries it on a CPU, over gloo with
`--gpus 2`.
"""

import argparse
import contextlib
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aerie.cluster.transport.admin import JoinTrainer
from aerie.speculative.build import local_engine
from aerie.workers.distributed.ports import free_port
from aerie.workers.distributed.weight_transfer.sender import WeightSender
from aerie.workers.distributed.weight_transfer.wire import BUFFER_BYTES, Announced, as_bytes, broadcasts
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.runner.transfer import receive_memory
from aerie.workers.scheduling.commands.command import OpenTransfer, StartUpdate
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request
from tests.bench.kernels.gpu_time import hardware
from tests.bench.machine import commit
from tests.bench.prompts import random_prompts
from tests.bench.round import MODELS, Setting, engine_spec, write_checkpoints
from tests.speculative.commands.trainer import Trainer
from tests.support.replica import Dimensions

_ADDRESS = "127.0.0.1"


def tensors_of(size: Dimensions, model: str, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random weights by their names in checkpoints: of a Llama, or of its EAGLE-3 head."""
    hidden, mlp, inputs = size.hidden, size.mlp, size.hidden * (1 if model == "target" else 2)
    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    layer = {
        "self_attn.q_proj": (queries, inputs),
        "self_attn.k_proj": (keys, inputs),
        "self_attn.v_proj": (keys, inputs),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    if model == "target":
        shapes = {f"model.layers.{i}.{name}": shape for i in range(size.layers) for name, shape in layer.items()}
        shapes |= {"model.embed_tokens": (size.vocab, hidden), "model.norm": (hidden,), "lm_head": (size.vocab, hidden)}
    else:
        shapes = {f"midlayer.{name}": shape for name, shape in (layer | {"hidden_norm": (hidden,)}).items()}
        shapes |= {"fc": (hidden, 3 * hidden), "norm": (hidden,), "lm_head": (size.draft_vocab, hidden)}
    return {
        f"{name}.weight": torch.empty(shape, dtype=dtype, device=device).normal_(0.0, 0.02)
        for name, shape in shapes.items()
    }


class _Copies:
    """Replaces a trainer's group: broadcasts are copies of tensors on the same device."""

    def __init__(self, chunks: Iterator[Tensor]) -> None:
        self._chunks = chunks

    def broadcast(self, tensor: Tensor) -> None:
        tensor.copy_(next(self._chunks))

    def close(self) -> None:
        pass


def run_trainer(size: Dimensions, device: str, dtype: torch.dtype, port: int, pipe: Connection) -> None:
    """The trainer's process: sends the tensors of the models that `pipe` names."""
    tensors = {model: tensors_of(size, model, device, dtype) for model in ("target", "draft")}
    pipe.send("ready")
    sender = WeightSender(_ADDRESS, port, 2, torch.device(device))
    with contextlib.suppress(EOFError):  # at the end of the benchmark
        while True:
            sender.send(tensors[pipe.recv()])
            pipe.send("sent")


class Bench:
    """An engine and its trainer."""

    def __init__(self, engine: LocalEngine, size: Dimensions, device: str, gpus: int) -> None:
        self.trainer = Trainer(engine, buffer_bytes=BUFFER_BYTES)
        self.trainer.timeout_s = 60.0
        executor: Any = engine.executor
        self._transfer = executor.handlers._handlers[StartUpdate].__self__
        self.models: dict[str, nn.Module] = {name: each.model for name, each in self._transfer._models.items()}
        dtype = next(each for each in self.models["target"].parameters() if each.dim() == 2).dtype
        self._pipe: Connection | None = None
        if gpus == 1:
            self.headers = {model: tensors_of(size, model, device, dtype) for model in self.models}
            return
        self.headers = {model: tensors_of(size, model, "meta", dtype) for model in self.models}
        context, port = multiprocessing.get_context("spawn"), free_port()
        self._pipe, theirs = context.Pipe()
        other = "cuda:1" if device != "cpu" else "cpu"
        context.Process(target=run_trainer, args=(size, other, dtype, port, theirs), daemon=True).start()
        assert self._pipe.recv() == "ready"
        opened = OpenTransfer(_ADDRESS, port, 1, 2, True, BUFFER_BYTES, 60.0)
        error, _ = self.trainer.call(JoinTrainer({"e": 1}, opened))
        assert not error, error

    def send(self, model: str) -> Callable[[], object]:
        """Return the trainer's part of an update."""
        if self._pipe is not None:
            pipe = self._pipe

            def ask() -> None:
                pipe.send(model)
                assert pipe.recv() == "sent"

            return ask
        tensors = self.headers[model]
        announced = [Announced(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()]
        chunks = (
            torch.cat([as_bytes(tensors[each.name]) for each in chunk])
            for chunk in broadcasts(announced, True, BUFFER_BYTES)
        )
        self._transfer._opened = OpenTransfer(_ADDRESS, 1, 1, 2, True, BUFFER_BYTES, 60.0)
        self._transfer._group = _Copies(chunks)
        return lambda: None


def addresses(models: dict[str, nn.Module]) -> list[int]:
    return [each.data_ptr() for model in models.values() for each in model.parameters()]


class Stamps:
    """Times of an engine's results."""

    def __init__(self, engine: LocalEngine) -> None:
        self.times: list[float] = []
        step = engine.step

        def noted() -> Any:
            outputs = step()
            if outputs:
                self.times.append(time.perf_counter())
            return outputs

        engine.step = noted  # type: ignore[method-assign]

    def gaps_ms(self, since: float, until: float) -> list[float]:
        """Gaps between results that end in this time."""
        return [(b - a) * 1e3 for a, b in zip(self.times, self.times[1:], strict=False) if since < b <= until] or [
            float("nan")
        ]


def measure(bench: Bench, model: str, stamps: Stamps) -> dict[str, Any]:
    """One update beside the running batch."""
    engine, trainer = bench.trainer.engine, bench.trainer
    began = time.perf_counter()
    while time.perf_counter() < began + 1.0:
        engine.step()
    send = bench.send(model)
    assert trainer.start(model) == ""
    graphs, places, sent = engine.executor.graphs, addresses(bench.models), time.perf_counter()
    error = trainer.update(bench.headers[model], send)
    assert not error, error
    arrived = time.perf_counter()
    error, loaded = trainer.finish()
    assert not error, error
    finished = time.perf_counter()
    while time.perf_counter() < finished + 0.3:
        engine.step()
    before, during = stamps.gaps_ms(began, sent), stamps.gaps_ms(sent, arrived)
    return {
        "model": model,
        "gb": sum(each.nbytes for each in bench.headers[model].values()) / 1e9,
        "arrival_s": arrived - sent,
        "switch_ms": loaded.took_s * 1e3,
        "gap_before_ms": statistics.median(before),
        "gap_arrival_ms": statistics.median(during),
        "max_gap_arrival_ms": max(during),
        "max_gap_switch_ms": max(stamps.gaps_ms(arrived, finished + 0.3)),
        "running": engine.scheduler.num_running,
        "missing": loaded.missing.get(model, ()),
        "new_graphs": engine.executor.graphs.num_captured - graphs.num_captured,
        "moved": sum(a != b for a, b in zip(places, addresses(bench.models), strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-3.1-8b")
    parser.add_argument("--shape", choices=("chain", "tree"), default="tree")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--stage", nargs="+", choices=("device", "host"), default=["device"])
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1)
    parser.add_argument("--tiny", action="store_true", help="a tiny model: a trial on any machine")
    arguments = parser.parse_args()
    name, size = ("tiny", MODELS["tiny"]) if arguments.tiny else (arguments.model, MODELS[arguments.model])
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    print(hardware(), commit(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoints(Path(folder), name, max_position=32768)
        tokens = 1500 if arguments.tiny else 9000
        spec = engine_spec(Path(folder), arguments.shape, arguments.batch, Setting(64, tokens), 1, True)
        for stage in arguments.stage:
            receive_memory.SPARE_BYTES = 1 << 60 if stage == "host" else 2 << 30
            with local_engine(spec) as engine:
                bench, stamps = Bench(engine, size, device, arguments.gpus), Stamps(engine)
                sampling = SamplingParams(tokens, 0.0)
                for i, prompt in enumerate(random_prompts(spec.worker.model, arguments.batch, 64)):
                    engine.scheduler.submit(Request(f"{stage}-{i}", prompt, sampling))
                for model in ("target", "draft"):
                    for _ in range(arguments.updates):
                        found = {"stage": stage, "gpus": arguments.gpus} | measure(bench, model, stamps)
                        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in found.items()}
                        print(json.dumps(rounded), flush=True)


if __name__ == "__main__":
    main()
