"""Milliseconds of a step that carries a prompt chunk beside running requests, of the round and of the chunk alone.

    python -m tests.bench.mixed [--model llama-3.1-8b] [--shapes plain chain] [--batches 1 8 32] [--chunks 512 2048]

Engines with dummy weights, as `tests.bench.round` makes them, driven plan by plan without a scheduler, two steps in
flight. Running requests have a context of 512 tokens; the chunk is the first of a longer prompt, so it samples nothing.
Stall: how much later a running request's next tokens come for the chunk. Against the sum: the step's time over that of
the round and the chunk one after the other; below 1 it pays to run them together. A Markdown table, then one JSON line.
Needs a GPU for figures that mean anything; `--tiny` tries it on a CPU.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import torch

from speculative.build import EngineLayout, EngineSpec, build_worker, plan_layout
from tests.bench.round import Setting, add_engine_options, commit, engine_spec, hardware, model_of, write_checkpoints
from workers.runner.worker import Worker
from workers.scheduling.plan import Chunk, SamplingParams, SlotInit, StepPlan, pack_i32

REPEATS = 3  # of which the fastest counts
ROUNDS, CHUNKED = 20, 6  # steps in a row of each kind


@dataclass(frozen=True)
class Figures:
    """Milliseconds per step."""

    round_ms: float
    chunk_ms: float
    mixed_ms: float

    @property
    def stall_ms(self) -> float:
        return self.mixed_ms - self.round_ms

    @property
    def of_sum(self) -> float:
        return self.mixed_ms / (self.round_ms + self.chunk_ms)


class Driver:
    """A rank with `max_running` requests' slots and one more for the prompt, and the plans that it is given."""

    def __init__(self, spec: EngineSpec, setting: Setting) -> None:
        self._layout: EngineLayout = plan_layout(spec)
        self._worker: Worker = build_worker(spec, self._layout, 0, "")
        self._setting = setting
        self._prompt_slot = spec.worker.scheduler.num_slots - 1
        self._pages_per_slot = min(
            self._layout.num_pages // spec.worker.scheduler.num_slots,
            -(-self._layout.max_position // spec.worker.cache.page_size),
        )
        self._steps = count()

    def start(self, batch: int) -> None:
        """Bring slots 0 .. batch - 1 to the end of their prompts; they never end."""
        for slot in range(batch):
            tokens = [10 + (7 * slot + i) % 50 for i in range(self._setting.prompt_tokens)]
            self._run(
                [
                    self._plan(
                        inits=(self._init(slot),),
                        pages=self._pages(slot),
                        chunks=(Chunk(slot, 0, pack_i32(tokens), -1),),
                    )
                ]
            )

    def start_prompt(self) -> None:
        """Give the last slot to a request whose prompt is never through."""
        slot = self._prompt_slot
        self._run(
            [
                self._plan(
                    inits=(self._init(slot),), pages=self._pages(slot), chunks=(Chunk(slot, 0, pack_i32([10]), 11),)
                )
            ]
        )

    def ms(self, batch: int, chunk_tokens: int, num_steps: int) -> float:
        """Per step of `batch` requests and chunk_tokens prompt tokens, either of which may be 0; after two of them."""
        chunks = (Chunk(self._prompt_slot, 0, pack_i32([10 + i % 50 for i in range(chunk_tokens)]), 11),)
        plans = [self._plan(range(batch), chunks=chunks if chunk_tokens else ()) for _ in range(num_steps)]
        self._run(plans[:2])
        times = []
        for _ in range(REPEATS):
            started_s = time.perf_counter()
            self._run(plans)
            times.append(time.perf_counter() - started_s)
        return round(min(times) / num_steps * 1e3, 4)

    def _run(self, plans: Sequence[StepPlan]) -> None:
        """All of them, two in flight; returns when the last has its result."""
        for plan in plans:
            self._worker.submit(plan)
            if self._worker.num_pending == 2:
                self._worker.take()
        while self._worker.num_pending:
            self._worker.take()

    def _plan(
        self,
        slots: Sequence[int] = (),
        inits: tuple[SlotInit, ...] = (),
        pages: bytes = b"",
        chunks: tuple[Chunk, ...] = (),
    ) -> StepPlan:
        shape = self._layout.shapes.default
        entries = len(slots) + sum(chunk.next_token < 0 for chunk in chunks)
        return StepPlan(
            epoch=0,
            step=next(self._steps),
            slots=pack_i32(list(slots)),
            shape=shape if slots else 0,
            max_kv_len=self._layout.max_position,
            next_shape=shape if entries else 0,
            drafting=b"\1" * entries if shape else b"",
            page_updates=pages,
            inits=inits,
            chunks=chunks,
        )

    def _init(self, slot: int) -> SlotInit:
        length = self._setting.prompt_tokens
        return SlotInit(slot, 0, length, self._layout.max_model_len, SamplingParams(self._layout.max_model_len, 0.0))

    def _pages(self, slot: int) -> bytes:
        """Updates that give the slot all the pages that it may ever have."""
        first = 1 + slot * self._pages_per_slot
        return pack_i32([x for i in range(self._pages_per_slot) for x in (slot, i, first + i)])


def measure(driver: Driver, batch: int, chunk_tokens: Sequence[int]) -> dict[str, Figures]:
    """By chunk size. The requests start anew, for rounds make contexts longer."""
    results = {}
    for tokens in chunk_tokens:
        driver.start(batch)
        driver.start_prompt()
        results[str(tokens)] = Figures(
            round_ms=driver.ms(batch, 0, ROUNDS),
            chunk_ms=driver.ms(0, tokens, CHUNKED),
            mixed_ms=driver.ms(batch, tokens, CHUNKED),
        )
    return results


def spec_of(folder: Path, shape: str, batch: int, setting: Setting) -> EngineSpec:
    """For `batch` running requests and a prompt."""
    return engine_spec(folder, shape, batch + 1, setting, 1, cuda_graphs=True)


def table(results: dict[str, dict[str, dict[str, Figures]]]) -> list[str]:
    lines = [
        "| shape | running | chunk | round ms | chunk alone ms | both ms | stall ms | of the sum |",
        "| --- " * 8 + "|",
    ]
    for shape, batches in results.items():
        for batch, chunks in batches.items():
            lines += [
                f"| {shape} | {batch} | {tokens} | {f.round_ms:.2f} | {f.chunk_ms:.2f} | {f.mixed_ms:.2f} | "
                f"{f.stall_ms:.2f} | {f.of_sum:.2f} |"
                for tokens, f in chunks.items()
            ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, ["plain", "chain"], [1, 8, 32])
    parser.add_argument("--chunks", nargs="+", type=int, default=[512, 2048])
    arguments = parser.parse_args()
    # rounds of all repeats, the warm-up's and the chunks', of 4 tokens at most
    rounds = 4 * (REPEATS * (ROUNDS + CHUNKED) + 4)
    prompt_tokens = 40 if arguments.tiny else 512
    output_tokens = max(rounds, max(arguments.chunks) - prompt_tokens)
    if prompt_tokens + output_tokens > 2048:
        parser.error(f"--chunks {max(arguments.chunks)}: these engines hold 2048 tokens per request; ask for less")
    results: dict[str, dict[str, dict[str, Figures]]] = {}
    model = model_of(arguments)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoints(Path(folder), model)
        for shape in arguments.shapes:
            setting = Setting(prompt_tokens, output_tokens)
            started_s = time.perf_counter()
            driver = Driver(spec_of(Path(folder), shape, max(arguments.batches), setting), setting)
            ready_s = time.perf_counter() - started_s
            results[shape] = {str(n): measure(driver, n, arguments.chunks) for n in arguments.batches}
            print(f"{shape}: ready in {ready_s:.1f} s, all in {time.perf_counter() - started_s:.1f} s", flush=True)
            del driver
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    print("\n".join(table(results)))
    figures = {
        shape: {n: {tokens: asdict(f) for tokens, f in chunks.items()} for n, chunks in batches.items()}
        for shape, batches in results.items()
    }
    print(
        json.dumps({"bench": "mixed", "hardware": hardware(), "commit": commit(), "model": model, "results": figures})
    )


if __name__ == "__main__":
    main()
