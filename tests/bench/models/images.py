"""Pictures: the vision tower, first tokens, and what other requests notice.

    python -m tests.bench images [--model qwen2.5-vl-7b] [--sides 224 1024 2048] [--neighbours 8] [--itl-target auto]
        [--profile]

Sizes of published models with dummy weights. For pictures of each side: milliseconds of the tower; of the first token
of a request with such a picture, over the engine alone; the same beside other requests that decode, and the largest
and the median gap between these requests' tokens meanwhile, in parts between their rounds and whole. Needs a GPU for
figures that mean anything; `--tiny` tries it on a CPU.

With --profile, also: kernels and calls of the CUDA runtime by name, of the tower and of the prompt of an encoded
picture; milliseconds of the first token with a new picture and with an encoded one.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from aerie.attention.config import CacheConfig
from aerie.deploy.bench.figures import table
from aerie.speculative.build import EngineSpec, local_engine
from aerie.workers.config import ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.prompt_inputs import Image, ImageSizes, PromptInputs
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.runner.worker import Worker
from aerie.workers.scheduling.plan import SamplingParams, pack_i32
from aerie.workers.scheduling.request import Request
from aerie.workers.timer import Timer
from aerie.workers.vision.config import VisionConfig, vision_of
from aerie.workers.vision.positions import mrope_positions
from aerie.workers.vision.tower import VisionTower
from tests.bench.kernels.gpu_time import hardware
from tests.bench.machine import commit
from tests.bench.prompts import random_prompts
from tests.bench.trace import call_lines, figures, kernel_lines, profiled
from tests.deploy.config.test_published_models import PUBLISHED
from tests.support.targets.image_models import make_image_model

# Towers of the published config.json, which the published files here leave out, and other fields of images.
_QWEN3 = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096}
_QWEN3 |= {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304}
_SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-vl-7b": (
        "Qwen2.5-VL-7B-Instruct",
        {
            "image_token_id": 151655,
            "vision_config": {
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "out_hidden_size": 3584,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "window_size": 112,
                "fullatt_block_indexes": [7, 15, 23, 31],
            },
        },
    ),
    "qwen3-vl-8b": (
        "Qwen3-VL-8B-Instruct",
        {"image_token_id": 151655, "vision_config": _QWEN3 | {"deepstack_visual_indexes": [8, 16, 24]}},
    ),
    "gemma-3-27b": (
        "gemma-3-27b-it",
        {
            "image_token_index": 262144,
            "mm_tokens_per_image": 256,
            "vision_config": _SIGLIP | {"image_size": 896, "patch_size": 14},
        },
    ),
    "gemma-4-26b-a4b": (
        "gemma-4-26B-A4B-it",
        {
            "image_token_id": 258880,
            "vision_config": _SIGLIP
            | {"num_key_value_heads": 16, "head_dim": 72, "patch_size": 16, "pooling_kernel_size": 3}
            | {"position_embedding_size": 10240, "standardize": True, "use_clipped_linears": False},
        },
    ),
}
TEXT_TOKENS = 32  # before a picture
OUTPUT_TOKENS = 8
REPEATS = 3
WARM_STEPS = 20


class Pictures:
    """Random pictures of a model, no two alike."""

    def __init__(self, source: ModelSource, vision: VisionConfig, sizes: ImageSizes) -> None:
        self._source, self._vision, self._sizes = source, vision, sizes
        self._count = 0

    def grid(self, side: int) -> tuple[int, int, int]:
        """Return the patches of a square picture, at most the largest one."""
        vision = self._vision
        side = min(side, int(vision.max_pixels**0.5)) if not vision.fixed else int(vision.max_pixels**0.5)
        tokens = max(1, side // (vision.patch_size * vision.merge_size))
        return 1, tokens * vision.merge_size, tokens * vision.merge_size

    def image(self, side: int, start: int = 0) -> Image:
        self._count += 1
        grid = self.grid(side)
        count = grid[1] * grid[2]
        data = np.random.default_rng(self._count).integers(0, 256, count * self._sizes.patch_bytes, dtype=np.uint8)
        return Image.of(start, count // self._vision.merge_size**2, grid, data.tobytes())

    def request(self, side: int, num_tokens: int = OUTPUT_TOKENS) -> Request:
        image = self.image(side, TEXT_TOKENS)
        (text,) = random_prompts(self._source, 1, TEXT_TOKENS, self._count)
        prompt = [*text, *[self._vision.filler_id] * image.num_rows, *text[:4]]
        inputs = PromptInputs(images=(image,))
        if self._vision.has_mrope:
            positions = pack_i32(mrope_positions(len(prompt), [image], self._vision.merge_size))
            inputs = PromptInputs(positions=positions, images=(image,), num_axes=3)
        return Request(f"picture-{self._count}", prompt, SamplingParams(num_tokens, 0.0), inputs=inputs)


@dataclasses.dataclass
class Stamps:
    """Times of a request's tokens in ms."""

    submitted: float
    tokens: list[float]


def run(engine: LocalEngine, neighbours: list[Request], later: Request | None, warm_steps: int) -> dict[str, Stamps]:
    """Run requests, and submit `later` after `warm_steps` steps; its end aborts the others. Return when each got
    tokens."""
    stamps: dict[str, Stamps] = {}

    def submit(request: Request) -> None:
        stamps[request.request_id] = Stamps(1e3 * time.perf_counter(), [])
        engine.scheduler.submit(request)

    for request in neighbours:
        submit(request)
    left, steps = len(neighbours) + (later is not None), 0
    while left:
        if later is not None and steps == warm_steps:
            submit(later)
        steps += 1
        for output in engine.step():
            if output.tokens:
                stamps[output.request.request_id].tokens.append(1e3 * time.perf_counter())
            left -= output.finish_reason is not None
            if later is output.request and output.finish_reason is not None:
                for request in neighbours:
                    engine.scheduler.abort(request.request_id)
                left = 0
    while engine.scheduler.num_running or engine.executor.num_pending:
        engine.step()
    return stamps


def beside(engine: LocalEngine, pictures: Pictures, side: int, others: list[list[int]]) -> tuple[float, float, float]:
    """Return ms of the first token beside others, and the largest and median gap of these until then."""
    picture = pictures.request(side)
    neighbours = [
        Request(f"other-{picture.request_id}-{i}", prompt, SamplingParams(300, 0.0)) for i, prompt in enumerate(others)
    ]
    stamps = run(engine, neighbours, picture, WARM_STEPS)
    own = stamps[picture.request_id]
    until = own.tokens[0]
    gaps = [
        after - before
        for request in neighbours
        for before, after in zip(stamps[request.request_id].tokens, stamps[request.request_id].tokens[1:], strict=False)
        if after >= own.submitted and before <= until
    ]
    return until - own.submitted, max(gaps), statistics.median(gaps)


def print_profile(engine: LocalEngine, tower: VisionTower, pictures: Pictures, side: int) -> None:
    def first_token_ms(request: Request) -> float:
        own = run(engine, [request], None, 0)[request.request_id]
        return own.tokens[0] - own.submitted

    new_ms, encoded_ms = list[float](), list[float]()
    for _ in range(REPEATS + 1):
        request = pictures.request(side, 1)
        new_ms.append(first_token_ms(request))
        again = Request(f"{request.request_id}-again", request.prompt, request.sampling, inputs=request.inputs)
        encoded_ms.append(first_token_ms(again))
    new_median, encoded_median = (statistics.median(each[1:]) for each in (new_ms, encoded_ms))
    print(f"side {side}: first token {new_median:.2f} ms; of an encoded picture {encoded_median:.2f} ms")
    image = pictures.image(side)
    last = Request(f"{request.request_id}-last", request.prompt, request.sampling, inputs=request.inputs)
    for name, events, repeats in (
        ("tower", profiled(lambda: tower.encode(image), REPEATS), REPEATS),
        ("prompt", profiled(lambda: first_token_ms(last), 1), 1),
    ):
        print(name, json.dumps({key: round(value, 3) for key, value in figures(events, repeats).items()}))
        print(*kernel_lines(events, repeats, 20), *call_lines(events, repeats, 8), sep="\n")


def write(folder: Path, name: str) -> None:
    published, images = MODELS[name]
    raw = json.loads((PUBLISHED / f"{published}.json").read_text())
    if "text_config" not in raw:
        raw["text_config"] = {}
    raw |= images | {"vision_config": raw.get("vision_config", {}) | images["vision_config"]}
    if not raw["text_config"]:
        del raw["text_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "preprocessor_config.json").write_text("{}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-vl-7b", choices=MODELS)
    parser.add_argument("--sides", type=int, nargs="+", default=[224, 1024, 2048])
    parser.add_argument("--neighbours", type=int, default=8)
    parser.add_argument("--itl-target", default="auto")
    parser.add_argument("--profile", action="store_true", help="kernels and calls by name, too")
    parser.add_argument("--tiny", action="store_true", help="a tiny model of the family, on a CPU")
    arguments = parser.parse_args()
    if arguments.profile and arguments.tiny:
        parser.error("--profile needs a GPU")
    rows = []
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        sides, family = arguments.sides, arguments.model[:7]
        if arguments.tiny:
            make_image_model(folder, {"gemma-3": "gemma3", "gemma-4": "gemma4"}.get(family, "qwen2_5_vl"))
            sides = [16, 40]
        else:
            write(folder, arguments.model)
        source = ModelSource(
            path=str(folder),
            load_format="auto" if arguments.tiny else "dummy",
            device="cpu" if arguments.tiny else "cuda",
            dtype="float32" if arguments.tiny else "bfloat16",
            max_model_len=512 if arguments.tiny else 8192,
        )
        target_ms = arguments.itl_target if arguments.itl_target == "auto" else float(arguments.itl_target)
        worker = WorkerConfig(
            source,
            CacheConfig(num_pages=200 if arguments.tiny else 1000, prefix_cache=False),
            SchedulerConfig(max_running=arguments.neighbours + 1, itl_target_ms=target_ms),
        )
        vision = vision_of(source)
        assert vision is not None
        others = random_prompts(source, arguments.neighbours, 16 if arguments.tiny else 512)
        with local_engine(EngineSpec(worker), all_graphs=False) as engine:
            assert isinstance(engine.executor, Worker) and engine.executor.costs is not None
            tower = engine.executor._batches._tower
            assert isinstance(tower, VisionTower)
            pictures, costs = Pictures(source, vision, tower._sizes), engine.executor.costs
            for side in sides:
                timer = Timer(torch.device(source.device))
                for _ in range(REPEATS):
                    image = pictures.image(side)
                    timer.mark()
                    tower.encode(image)
                    timer.mark()
                tower_ms = statistics.median(timer.read())
                alone = []
                for _ in range(REPEATS):
                    request = pictures.request(side)
                    own = run(engine, [request], None, 0)[request.request_id]
                    alone.append(own.tokens[0] - own.submitted)
                engine.scheduler.use_costs(costs)
                in_parts = [beside(engine, pictures, side, others) for _ in range(REPEATS)]
                engine.scheduler.use_costs(msgspec.structs.replace(costs, image_patches=(), image_ms=()))
                whole = [beside(engine, pictures, side, others) for _ in range(REPEATS)]
                found_ms = [tower_ms, statistics.median(alone)]
                for found in (in_parts, whole):
                    found_ms += [statistics.median(column) for column in zip(*found, strict=True)]
                rows.append((side, image.num_patches, *(round(each, 2) for each in found_ms)))
                print(*rows[-1], flush=True)
            for side in sides if arguments.profile else ():
                print_profile(engine, tower, pictures, side)
    titles = ["side", "patches", "tower", "first token", "beside, in parts", "largest gap", "median gap"]
    titles += ["beside, whole", "largest gap", "median gap"]
    print(*table(titles, rows), sep="\n")
    record = {"bench": "images", "hardware": hardware(), "commit": commit(), "model": arguments.model}
    print(json.dumps(record | {"target_ms": target_ms, "rows": rows}))


if __name__ == "__main__":
    main()
