"""Which kernels an engine asks Triton for in its start, and which only later, found out without a GPU.

    python -m tests.support.kernels.census dsv3-rank chain [--steps 40] [--max-running 64]

A rank of a real model's sizes, with few layers, is built as for an H200 and takes steps whose tensors have no memory
(torch's fake tensors); kernels are neither compiled nor launched. Triton asks for a kernel for each set of types,
constants, and numbers and addresses that are multiples of 16, which is what is counted here. A kernel that a start did
not ask for is compiled while everybody who is served waits, for a tenth of a second or more.

Prints a JSON line: `start`, how many kernels a start asks for, and `late`, one line for each kernel after that. To be
run in a process of its own: it puts stand-ins for the GPU in torch's place.
"""

import argparse
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import json
import random
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.support import ROOT

# What asks which device it is on, and is to think that it is on a GPU.
ON_A_GPU = {
    "aerie.kernels.capability": [
        ("_of(device.type, device.index)", '_of("cuda", 0)'),
        (" and torch.cuda.is_available()", ""),
        ('self.type == "cpu"', "True"),  # tensors are in the host's memory
        ("        return self.is_gpu\n", "        return False\n"),  # neither streams nor graphs
    ],
}
NUMPY = {
    torch.bool: np.bool_,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
    torch.float64: np.float64,
}
LAYERS = {"plain": 2, "chain": 8, "tree": 8}  # a head captures three of eight
LATENT_LAYERS = 2  # the last has experts
HYBRID_LAYERS = 4  # the last has attention
STEPS = 40
STEP_TOKENS = 8192
MAX_RUNNING = 64
MANY_PAGES = 1 << 20
GREEDY: dict[str, Any] = {"temperature": 0.0}
RANDOM: dict[str, Any] = {"temperature": 1.0}
FILTERED = RANDOM | {"top_p": 0.9}
SAMPLING = GREEDY, RANDOM, FILTERED, FILTERED | {"frequency_penalty": 0.1, "logprobs": 3}  # as steps are captured


class _Reader(importlib.machinery.SourceFileLoader):
    """Device tests of the modules in `ON_A_GPU`, with their answers."""

    def get_code(self, fullname: str) -> Any:
        source = Path(self.path).read_text()
        for asked, answer in ON_A_GPU[fullname]:
            assert asked in source, f"{fullname} does not ask {asked} any more"
            source = source.replace(asked, answer)
        return compile(source, self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in ON_A_GPU:
            return None
        file = ROOT / f"{fullname.replace('.', '/')}.py"
        return importlib.util.spec_from_file_location(fullname, file, loader=_Reader(fullname, str(file)))


class _Event:
    def record(self) -> None:
        """At once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is under way."""


class _Properties:
    multi_processor_count = 132


def _apply(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply`, which cannot put fake tensors in a parameter's place."""
    for child in module.children():
        _apply(child, function)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(function(parameter), parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


def _zeros(tensor: FakeTensor, **_: object) -> Any:
    return np.zeros(tuple(tensor.shape), NUMPY[tensor.dtype])


def stand_in_for_a_gpu() -> None:
    """Before anything of Aerie is imported."""
    sys.meta_path.insert(0, _Finder())
    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: _Properties()
    cuda.is_current_stream_capturing = lambda: False
    cuda.Event = _Event
    replaced: list[tuple[type, str, object]] = [
        (torch.Tensor, "is_cuda", property(lambda _: True)),
        (nn.Module, "_apply", _apply),
        (FakeTensor, "data_ptr", lambda self: (1 << 20) + self.storage_offset() * self.element_size()),
        (FakeTensor, "numpy", _zeros),
        (FakeTensor, "tolist", lambda self: _zeros(self).tolist()),
    ]
    for owner, name, value in replaced:
        setattr(owner, name, value)


class Census:
    """Stands for Triton's asynchronous mode, which is asked for every kernel that is not there.

    kernels: of each key its name, and what it was asked for with.
    """

    def __init__(self, unlaunched: Callable[[], object]) -> None:
        self.kernels: dict[Hashable, tuple[str, dict[str, str]]] = {}
        self._unlaunched = unlaunched

    def submit(self, key: Hashable, compile_kernel: Callable[[], Any], finalize: Callable[[Any], None]) -> object:
        if key not in self.kernels:
            cells = (cell.cell_contents for cell in compile_kernel.__closure__ or ())
            source: Any = next(value for value in cells if type(value).__name__ == "ASTSource")
            self.kernels[key] = source.fn.__name__, _facts(source)
        return self._unlaunched()

    def late(self, known: set[Hashable]) -> Iterator[str]:
        """One line for each kernel but the known ones: its name, and how it differs from the known one that is most
        like it."""
        for key, (name, facts) in self.kernels.items():
            if key not in known:
                others = (self.kernels[other][1] for other in known if self.kernels[other][0] == name)
                nearest = min((_differences(other, facts) for other in others), key=len, default=["new"])
                yield f"{name}: {', '.join(nearest)}"


def _differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return [f"{name}: {one.get(name)} -> {other.get(name)}" for name in other if one.get(name) != other.get(name)]


def _facts(source: Any) -> dict[str, str]:
    """Return facts about a kernel's arguments, by name."""
    names = source.fn.arg_names
    facts = {names[place[0]]: str(value) for place, value in source.constants.items()}
    facts |= {name: kind for name, kind in source.signature.items() if kind != "constexpr"}
    for place, aligned in source.attrs.items():
        facts[names[place[0]]] += " of 16" if aligned else ""
    return facts


def take(
    model: str,
    shape: str,
    steps: int,
    max_running: int,
    deterministic: bool = False,
    share: float = 1.0,
    step_tokens: int = STEP_TOKENS,
) -> dict[str, Any]:
    """Return what `main` prints."""
    import triton

    from aerie.workers.runner.graphs.kernel_compilation import _mode, _SkippedKernel
    from tests.support.kernels.triton_driver import Hopper

    triton.runtime.driver._active = Hopper()
    census = Census(_SkippedKernel)
    with FakeTensorMode(allow_non_fake_inputs=True), _mode(census):
        rank = Rank.built(model, shape, max_running, deterministic, step_tokens)
        rank.start()
        known = set(census.kernels)
        rank.capture_rest(share)
        choice = random.Random(0)
        for _ in range(steps):
            counts = [_prompt_tokens(choice) for _ in range(min(choice.choice((1, 1, 2, 4)), max_running))]
            rounds = min(choice.choice((0, 0, 1, 3, 7, 20, 41)), max_running - len(counts))
            rank.run(rounds, counts, choice.choice((0, 0, 64, 100)), choice.choice(SAMPLING))
    return {"start": len(known), "late": sorted(census.late(known))}


def _prompt_tokens(choice: random.Random) -> int:
    return choice.choice((1, 2, choice.randint(3, 20), choice.randint(20, 300), choice.randint(300, 1900)))


@dataclasses.dataclass(frozen=True)
class Rank:
    """A rank whose steps compute nothing."""

    worker: Any
    layout: Any
    page_size: int
    deterministic: bool = False

    @staticmethod
    def built(
        model: str, shape: str, max_running: int, deterministic: bool = False, step_tokens: int = STEP_TOKENS
    ) -> "Rank":
        """model, shape: of `tests.bench.round`."""
        from aerie.speculative.build import plan_engine
        from aerie.workers.models import loading, weights
        from aerie.workers.runner import build
        from tests.bench import round as bench
        from tests.bench.models import deepseek_rank, hybrids
        from tests.support.engine_plans import as_captured

        for module in (loading, weights):
            module.fill_dummy = lambda *_: None  # type: ignore[attr-defined]
        if model in deepseek_rank.CONFIGS:
            config = deepseek_rank.CONFIGS[model]
            config |= {"num_hidden_layers": LATENT_LAYERS, "first_k_dense_replace": LATENT_LAYERS - 1}
        elif model in hybrids.CONFIGS:
            hybrids.CONFIGS[model] |= {"num_hidden_layers": HYBRID_LAYERS}
        else:
            bench.MODELS[model] = dataclasses.replace(bench.MODELS[model], layers=LAYERS[shape])
        if deterministic:  # it is off where there is no GPU
            build.checked_deterministic = lambda *_: True  # type: ignore[assignment]
        build.warm_up = lambda *_: None  # type: ignore[assignment]  # `start` does, once steps are captured
        with tempfile.TemporaryDirectory() as folder:
            bench.write_checkpoints(Path(folder), model)
            spec = bench.engine_spec(Path(folder), shape, max_running, bench.Setting(), 1, False, "triton")
            source = dataclasses.replace(spec.worker.model, device="cpu", dtype="bfloat16")
            scheduler = dataclasses.replace(spec.worker.scheduler, max_step_tokens=step_tokens)
            worker = dataclasses.replace(spec.worker, model=source, scheduler=scheduler, measure_costs=False)
            engine = plan_engine(dataclasses.replace(spec, worker=worker))
            rank = build.build_rank(worker, as_captured(engine), 0, "")
        return Rank(rank.worker, rank.layout, worker.cache.page_size, deterministic)

    def start(self) -> None:
        """What a start on a GPU launches beside what `built` has: dry runs, the largest steps, the first captures,
        the warm-up, and the steps whose costs are measured. From then on steps run as they are captured."""
        from aerie.workers.config import GraphCapture
        from aerie.workers.runner.costs import cost_points, cost_probe
        from aerie.workers.runner.graphs import warm_up
        from aerie.workers.runner.graphs.kernel_compilation import CompileAhead
        from aerie.workers.timer import Timer
        from tests.support.kernels.eager_graphs import EagerRecorder

        worker, layout, slots, gpu = self.worker, self.layout, self.worker._slots, torch.device("cuda")

        class Recorder(EagerRecorder):
            """Replays ask Triton for nothing, and a step that runs before its recording for the same kernels."""

            def record(self, function: Callable[[], Any], was_run: bool = True) -> tuple[Callable[[], None], Any]:
                return lambda: None, function()

            def dry_run(self, function: Callable[[], object], ahead: object) -> None:
                function()

            def run_on_own_stream(self, function: Callable[[], object]) -> None:
                """`record` runs it."""

        for _, plan in warm_up.largest_steps(layout):
            warm_up.run(worker, plan)
        worker._strategy = graphed = warm_up.graphed_strategy(
            worker._strategy,
            slots,
            layout,
            Recorder(),
            with_chunks=not self.deterministic,
            tower=worker._batches._tower,
        )
        first = warm_up.first_graphs(graphed, layout, self.page_size, gpu)
        roomy, timer = layout.with_pages(MANY_PAGES), Timer(torch.device("cpu"))
        extent = cost_probe.probe_extent(roomy, self.page_size, graphed.wanted_token_buckets, gpu)
        probe = cost_probe.CostProbe(graphed, slots, worker._group, roomy, self.page_size, timer)
        ahead = CompileAhead()
        with torch.inference_mode():
            graphed.dry_run(first, ahead, worker._group)
            ahead.close()
            graphed.capture(GraphCapture(), worker._group, first)
            warm_up.warm_up(worker, layout, deterministic=self.deterministic)
            for point in (point for group in cost_points.points_to_measure(extent) for point in group.points):
                probe._set_dummy_requests(point.num_requests, 0 if point.chunk_tokens else point.context)
                graphed.step(probe._batch(point))

    def capture_rest(self, share: float = 1.0) -> None:
        """What an idle rank captures after its start, once a request has had a grammar. share: of it, drawn."""
        graphed, choice = self.worker._strategy, random.Random(1)
        graphed.want_masked()
        while (key := graphed._queue.next()) is not None:
            if choice.random() < share:
                graphed.capture_next(self.worker._group)
            else:
                graphed._queue.remove_failed(key)

    @property
    def longest(self) -> int:
        """Prompt, in tokens."""
        return int(self.layout.max_model_len) - 128

    def run(self, rounds: int, counts: Sequence[int], begun: int = 0, sampling: Mapping[str, Any] = GREEDY) -> None:
        """A step with so many rounds, and so many tokens of each of some prompts, of which `begun` have been read
        before. Of several prompts the last goes on after them. sampling: of all."""
        from aerie.workers.runner.graphs import warm_up
        from aerie.workers.scheduling.plan import Chunk, SamplingParams, SlotInit, StepPlan, pack_i32

        longest, tree = self.layout.max_model_len, self.layout.shapes.default
        params, chunks = SamplingParams(8, **sampling), []
        inits = [SlotInit(slot, begun, begun + 4, longest, params) for slot in range(rounds)]
        for number, count in enumerate(min(count, self.longest) for count in counts):
            ends = number == 0 or number < len(counts) - 1
            inits.append(SlotInit(rounds + number, begun, begun + count + 4, longest, params))
            chunks.append(Chunk(rounds + number, begun, pack_i32([1] * count), -1 if ends else 1))
        num_drafting = rounds + sum(chunk.next_token < 0 for chunk in chunks)
        plan = StepPlan(
            0, 0, pack_i32(range(rounds)), tree if rounds else 0, self.layout.max_position, tree,
            bytes([1] * num_drafting) if tree else b"", inits=tuple(inits), chunks=tuple(chunks),
        )  # fmt: skip
        warm_up.run(self.worker, plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("shape", choices=("plain", "chain", "tree"))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--max-running", type=int, default=MAX_RUNNING)
    parser.add_argument("--share", type=float, default=1.0, help="of the later captures")
    parser.add_argument("--step-tokens", type=int, default=STEP_TOKENS, help="of the largest step")
    arguments = parser.parse_args()
    stand_in_for_a_gpu()
    options = arguments.steps, arguments.max_running, arguments.deterministic, arguments.share, arguments.step_tokens
    print(json.dumps(take(arguments.model, arguments.shape, *options)))


if __name__ == "__main__":
    main()
