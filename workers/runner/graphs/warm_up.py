"""Steps that a rank runs before its first request: one of each kind, for `aerie.workers.runner.build`, and the largest,
whose memory `aerie.workers.runner.memory` measures. Also chooses the graphs that a start captures, and compiles their
kernels ahead."""

import logging
from collections.abc import Callable, Iterable

import torch

from aerie.attention.expansion import MAX_TOKENS
from aerie.kernels.capability import Capability
from aerie.workers.config import WorkerConfig
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.engine_layout import EngineLayout
from aerie.workers.prompt_inputs import Image, PromptInputs
from aerie.workers.runner.costs.cost_points import measured_steps
from aerie.workers.runner.costs.cost_probe import probe_extent
from aerie.workers.runner.decoding import CuttableStrategy
from aerie.workers.runner.graphs.compile_jobs import CompileProcesses
from aerie.workers.runner.graphs.cuda_graph import GraphedDecoding
from aerie.workers.runner.graphs.graph_keys import GraphKey, bucket_sizes, token_buckets
from aerie.workers.runner.graphs.kernel_compilation import CompileAhead, report_compilations
from aerie.workers.runner.graphs.step_capture import Recorder
from aerie.workers.runner.worker import Worker
from aerie.workers.sampling import MAX_LOGPROBS
from aerie.workers.scheduling.plan import Chunk, SamplingParams, SlotInit, StepPlan, pack_i32
from aerie.workers.slots import SlotTable
from aerie.workers.vision.tower import VisionTower

WARM_UP_TOKENS = 16  # tokens of the prompt that warms up
# Rows that fill less than their tile of 64 or 128. Products of deterministic engines have a kernel of their own for
# them (`aerie.kernels.gemm.tiles.fills_tile`), which no captured step launches.
SPARSE_ROWS = (40, 72)


def warm_up(worker: Worker, layout: EngineLayout, image: Image | None = None, deterministic: bool = False) -> None:
    """Run each kind of step once, so that the first request compiles nothing, and an error in a step fails the start:

    - a chunk that does not end its prompt (only once, because it does not sample);
    - a whole prompt and a round of every tree shape, greedy and random;
    - a whole prompt, and a prompt of one token, with filters, penalties and log-probabilities;
    - with adapters, again the first and second, with the adapter at index 0;
    - a chunk of an image;
    - deterministic: `SPARSE_ROWS` prompts of one token, or tokens of as many prompts as there are slots.

    image: a small one of the vision tower, which the ranks then keep.

    Slot 0 has no pages, so all KV goes to the dummy page.
    """
    tokens = pack_i32([1] * WARM_UP_TOKENS)
    greedy, random = SamplingParams(WARM_UP_TOKENS, 0.0), SamplingParams(WARM_UP_TOKENS, 1.0)
    rest = SamplingParams(WARM_UP_TOKENS, 1.0, top_p=0.9, frequency_penalty=0.1, logprobs=1)
    beginning, whole = (Chunk(0, 0, tokens, next_token) for next_token in (1, -1))
    single = Chunk(0, 0, pack_i32([1]), -1)
    kinds = (
        (greedy, (beginning, whole)),
        (random, (whole,)),
        (rest, (whole, single)),
    )
    adapted = [] if layout.lora is None else [(*kinds[0], 0)]
    for number, (sampling, chunks, adapter) in enumerate([*((*kind, -1) for kind in kinds), *adapted]):
        init = SlotInit(0, 0, WARM_UP_TOKENS, 2 * WARM_UP_TOKENS, sampling, adapter=adapter)
        plans = [_prompt_step(number, layout, init, chunk) for chunk in chunks]
        if sampling is not rest:  # captures launch the kernels of these rounds
            plans += [_round_step(number, layout, shape) for shape in range(len(layout.shapes))]
        for plan in plans:
            run(worker, plan)
    longest = min(layout.scheduler.step_token_limit, layout.max_model_len - 2)
    if layout.images is not None and image is not None and image.num_rows <= longest:
        positions = pack_i32([i for _ in range(layout.images.num_axes) for i in range(image.num_rows)])
        inputs = PromptInputs(positions=positions, images=(image,), num_axes=layout.images.num_axes)
        init = SlotInit(0, 0, image.num_rows, 2 * image.num_rows, greedy)
        run(
            worker,
            _prompt_step(len(kinds), layout, init, Chunk(0, 0, pack_i32([1] * image.num_rows), 1, inputs=inputs)),
        )
    for rows in SPARSE_ROWS if deterministic else ():
        ends = min(rows, layout.scheduler.num_slots)
        lengths = [1] * (ends - 1) + [min(rows - ends + 1, longest)]
        run(worker, _chunk_step(layout, [_chunk_from(layout, slot, 0, count) for slot, count in enumerate(lengths)]))


def run(worker: Worker, plan: StepPlan) -> None:
    """Run one step and wait for it."""
    worker.submit(plan)
    worker.take()


def largest_steps(layout: EngineLayout) -> list[tuple[str, StepPlan]]:
    """Return the steps that use the most memory, each with its kind. They must run in this order:

    - "chunks": the last chunks of prompts, one for every slot over all such steps; then rounds can run in all slots;
    - "rounds": rounds of all slots, one step of every tree shape;
    - "chunks", with latent rows: the longest expansion;
    - "both": the maximum number of prompt tokens, with rounds of the remaining slots.

    All have filters, penalties and log-probabilities, also of prompts. They attend to KV of maximum length, on the
    dummy page.
    """
    num_slots, count, longest = layout.scheduler.num_slots, layout.scheduler.step_token_limit, layout.max_model_len - 2
    per_slot = max(1, min(longest, count // num_slots))
    ends = [_last_chunk(layout, slot, per_slot) for slot in range(num_slots)]
    at_once = max(1, count // per_slot)
    steps = [("chunks", _chunk_step(layout, ends[i : i + at_once])) for i in range(0, num_slots, at_once)]
    for shape in range(len(layout.shapes)):
        drafting = bytes([1] * num_slots) if shape else b""
        plan = StepPlan(
            0,
            0,
            slots=pack_i32(range(num_slots)),
            shape=shape,
            max_kv_len=layout.max_position,
            next_shape=shape,
            drafting=drafting,
        )
        steps.append(("rounds", plan))
    num_prompts = min(num_slots, -(-count // longest))
    if layout.has_latent_rows and count * MAX_TOKENS < longest:
        steps.append(("chunks", _chunk_step(layout, [_chunk_from(layout, 0, (MAX_TOKENS - 1) * count, count)])))
    ends = [_last_chunk(layout, slot, min(longest, count // num_prompts)) for slot in range(num_slots)[-num_prompts:]]
    return [*steps, ("both", _chunk_step(layout, ends, num_rounds=num_slots - num_prompts))]


def _last_chunk(layout: EngineLayout, slot: int, count: int) -> tuple[SlotInit, Chunk]:
    """Return a chunk of the last `count` tokens of the longest prompt, see `_chunk_from`."""
    return _chunk_from(layout, slot, layout.max_model_len - 2 - count, count)


def _chunk_from(layout: EngineLayout, slot: int, start: int, count: int) -> tuple[SlotInit, Chunk]:
    """Return a chunk of `count` tokens from position `start` that ends a prompt, and its request in `slot`."""
    rest = SamplingParams(
        2, 1.0, top_p=0.9, frequency_penalty=0.1, logprobs=MAX_LOGPROBS, logit_bias={1: 0.1}, min_tokens=1
    )
    adapter = 0 if layout.lora is not None and layout.lora.experts else -1  # experts with adapters use more memory
    init = SlotInit(slot, start, start + count, layout.max_model_len, rest, adapter=adapter)
    return init, Chunk(slot, start, pack_i32([1] * count), -1, MAX_LOGPROBS if count > 1 else -1)


def _chunk_step(layout: EngineLayout, ends: Iterable[tuple[SlotInit, Chunk]], num_rounds: int = 0) -> StepPlan:
    """Return the plan of a step that enters these requests and computes their chunks, beside rounds of the first
    `num_rounds` slots."""
    inits, chunks = zip(*ends, strict=True)
    shape = layout.shapes.default
    drafting = bytes([1] * (num_rounds + len(chunks))) if shape else b""
    slots, verified = pack_i32(range(num_rounds)), shape if num_rounds else 0
    return StepPlan(
        0,
        0,
        slots=slots,
        shape=verified,
        max_kv_len=layout.max_position,
        next_shape=shape,
        drafting=drafting,
        inits=inits,
        chunks=chunks,
    )


def _prompt_step(step: int, layout: EngineLayout, init: SlotInit, chunk: Chunk) -> StepPlan:
    """Return the plan of a step that enters one request and computes a chunk of its prompt; if the chunk ends the
    prompt (no `next_token`), it also drafts the first tree."""
    next_shape = layout.shapes.default if chunk.next_token < 0 else 0
    drafting = b"\1" if next_shape else b""
    return StepPlan(
        0,
        step,
        slots=b"",
        shape=0,
        max_kv_len=layout.max_position,
        next_shape=next_shape,
        drafting=drafting,
        inits=(init,),
        chunks=(chunk,),
    )


def _round_step(step: int, layout: EngineLayout, shape: int) -> StepPlan:
    """Return the plan of a step that verifies and drafts a tree of `shape` in slot 0."""
    return StepPlan(
        0,
        step,
        slots=pack_i32([0]),
        shape=shape,
        max_kv_len=layout.max_position,
        next_shape=shape,
        drafting=b"\1" if shape else b"",
    )


logger = logging.getLogger(__name__)


def rounds_are_graphs(worker: WorkerConfig, device: Capability, host_readers: str | None, rank: int) -> bool:
    """Whether rounds are captured as CUDA graphs. Rank 0 warns if an attention backend prevents it.

    host_readers: the result of `cpu_length_readers`.
    """
    wanted = device.captures_graphs and worker.cuda_graphs
    if wanted and host_readers is not None and rank == 0:
        logger.warning(
            "rounds run eagerly, without CUDA graphs, because attention backend %s reads lengths on the host "
            "(needs_cpu_seq_lens); triton does not",
            host_readers,
        )
    return wanted and host_readers is None


def graphed_strategy(
    strategy: CuttableStrategy,
    slots: SlotTable,
    layout: EngineLayout,
    recorder: Recorder,
    with_chunks: bool = True,
    tower: VisionTower | None = None,
) -> GraphedDecoding:
    """Wrap the strategy in graphs, without capturing any.

    with_chunks: also capture steps with prompt tokens.
    tower: encodes images; None in engines that take none.
    """
    buckets = bucket_sizes(layout.scheduler.num_slots)
    tokens = token_buckets(layout.scheduler.step_token_limit) if with_chunks else ()
    images = None
    if tower is not None and slots.always_shifts and tokens:
        images = tower.row_buffer(tokens[-1])
    return GraphedDecoding(
        strategy,
        slots,
        buckets=buckets,
        max_kv_len=layout.max_position,
        recorder=recorder,
        tokens=tokens,
        expands=layout.has_latent_rows,
        has_states=bool(layout.bytes_per_state),
        has_row_index=layout.lora is not None,
        image_values=images,
    )


def first_graphs(
    graphed: GraphedDecoding, layout: EngineLayout, page_size: int, device: torch.device
) -> frozenset[GraphKey]:
    """Return the graphs that a start waits for (`GraphKeys.first`). They do not depend on the number of KV pages."""
    extent = probe_extent(layout.with_pages(0), page_size, graphed.wanted_token_buckets, device)
    return graphed.first_graphs(measured_steps(extent))


def compile_ahead(
    graphed: GraphedDecoding,
    first: frozenset[GraphKey],
    group: TPGroup,
    compilers: CompileProcesses | None,
    launch_others: Callable[[], None] = lambda: None,
) -> str:
    """Compile the kernels of the graphs `first` in parallel, instead of one by one at their launch. Return a line for
    the log. launch_others: launches kernels of other steps."""
    report_compilations(False)  # a previous engine in this process may have turned it on
    ahead = CompileAhead(processes=compilers)
    try:
        with ahead.dry_run():
            launch_others()
        graphed.dry_run(first, ahead, group)
    except Exception as error:  # a compiler may raise any exception; Triton's are not RuntimeErrors
        logger.warning("could not compile kernels ahead; they are compiled at their first launch: %s", error)
    finally:
        ahead.close()
    torch.cuda.empty_cache()  # frees the memory of the dry runs before memory is measured
    return f"{ahead.num_kernels} kernels ready"
