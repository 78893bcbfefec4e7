"""A strategy's steps as CUDA graphs: one graph per (shapes, batch bucket, prompt tokens, kind of sampling).

`GraphedDecoding` wraps any `DecodingStrategy`, which it knows nothing about: what a step reads and writes lives in
device tensors by slot, so a captured round needs two inputs, the slots and those that draft, and its outputs are
tensors it always writes to the same place. All graphs are captured at start. Steps that have none run eagerly: those
with more prompt tokens or chunks than any graph has room for, chunks beside requests with penalties or
log-probabilities, and kinds that the allowance for captures (`workers.config.GraphCapture`) did not reach. No request
ever waits for a capture, which would hold up all others on every rank.

A round may verify any shape, whatever was drafted before (`speculative.tree_table`), so that every graph verifies and
drafts the same one, and a change of shape needs no graph of its own: S shapes take S graphs per bucket and kind, not S
squared. Shapes between plain decoding and the default (`workers.config.RoundShapes.unrestricted`) have fewer: batches
are padded to powers of two, greedy ones take the graphs of random ones (0.03 ms of 5 at batch 1, 0.1 of 10 at 64), and
none have penalties, log-probabilities or prompt chunks, where the scheduler does not choose them. For 64 requests that
is 14 graphs a shape, beside 43 of plain decoding and of the default each, and 24 of plain rounds with prompt chunks.

Capturing changes no request's state: it runs rounds of the padding slot, which has finished, so commits keep its row
and count nothing, its KV goes to the dummy page, and nobody verifies the tree that is drafted for it.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.config import GraphCapture, RoundShapes
from workers.distributed.tp_group import TPGroup
from workers.runner.batch import PromptChunks, StepBatch, StepTensors
from workers.runner.decoding import DecodingStrategy
from workers.runner.graph_inputs import MAX_CHUNKS, StepInput
from workers.runner.recorder import Recorder
from workers.sampling.sampler import CAPTURED_NEEDS, Logprobs, SamplingNeeds
from workers.slots.slot_table import SlotTable

TOKEN_BUCKETS = (16, 64, 128, 256, 384, 512, 640, 768, 896, 1024, 1536, 2048)
_FEW_TOKENS = 512  # up to which steps with prompt tokens are captured beside every power of two of requests
CHUNK_NEEDS = SamplingNeeds(random=True, filtered=True)  # filters cost 0.1 ms more, a step without a graph 25
BETWEEN_NEEDS = (SamplingNeeds(random=True), CHUNK_NEEDS)  # of shapes between plain decoding and the default
_EAGER_RUNS = 1  # before capture: it compiles kernels, chooses algorithms and makes workspaces


@dataclass(frozen=True)
class GraphKey:
    """What one graph serves: batches of up to `bucket` requests in a round that verifies `shape` and drafts
    `next_shape`, and of up to `tokens` prompt tokens beside them, with these needs or fewer."""

    shape: int
    next_shape: int
    bucket: int
    needs: SamplingNeeds
    tokens: int = 0


@dataclass
class _Captured:
    """A captured step.

    run: replays it.
    output: what it emitted, at the same place after every replay.
    """

    run: Callable[[], None]
    input: StepInput
    output: StepTensors


@dataclass(frozen=True)
class Taken:
    """What a capture took: seconds, and device memory; other processes' memory too, if they allocate meanwhile."""

    seconds: float
    num_bytes: int

    @staticmethod
    def together(each: Iterable["Taken"]) -> "Taken":
        each = tuple(each)
        return Taken(sum(taken.seconds for taken in each), sum(taken.num_bytes for taken in each))


@dataclass(frozen=True)
class CaptureReport:
    """rounds: what each captured round took, in their order.
    num_left_out: how many more were wanted.
    """

    rounds: Mapping[GraphKey, Taken]
    num_left_out: int

    @property
    def whole(self) -> Taken:
        return Taken.together(self.rounds.values())


def bucket_sizes(max_running: int) -> tuple[int, ...]:
    """Batch sizes that are captured: 1, 2, 4, 8, then multiples of 8 to 64, of 16 to 256, of 32 beyond; the largest is
    at least max_running."""
    sizes, size = [1, 2, 4], 8
    while size < max_running:
        sizes.append(size)
        size += 8 if size < 64 else 16 if size < 256 else 32
    return tuple([s for s in sizes if s < max_running] + [max_running])


def is_always_captured(key: GraphKey) -> bool:
    """Whether this is captured whatever it takes: greedy and plainly random rounds."""
    return key.tokens == 0 and not key.needs.full_logits


def buckets_of(needs: SamplingNeeds, buckets: Sequence[int]) -> tuple[int, ...]:
    """The buckets, ascending, that rounds of a kind are captured for: all of them, or, of the kinds that fewer requests
    have, powers of two and the largest, so that a batch is padded to twice its size at most."""
    return powers_of_two(buckets) if needs.full_logits else tuple(buckets)


def powers_of_two(buckets: Sequence[int]) -> tuple[int, ...]:
    """Of ascending buckets these and the largest."""
    return tuple(size for size in buckets if size & (size - 1) == 0 or size == buckets[-1])


def token_buckets(max_step_tokens: int) -> tuple[int, ...]:
    """Numbers of prompt tokens that steps are captured for. Up to 64 rows take hardly longer than 16: their products
    read the weights. Twice 2,048 take the device twice as long, so that two steps are as good. Launched one by one, the
    kernels of a step keep the host for 25 to 90 ms, in which it sees no other step's end."""
    return tuple(size for size in TOKEN_BUCKETS if size < max_step_tokens) + tuple(
        size for size in (max_step_tokens,) if size <= TOKEN_BUCKETS[-1]
    )


def buckets_beside(num_tokens: int, buckets: Sequence[int]) -> tuple[int, ...]:
    """Of ascending buckets those that steps with so many prompt tokens are captured for: powers of two, of which up to
    16 only those of four beside many tokens, where the padding of a few requests costs little."""
    sizes = powers_of_two(buckets)
    if num_tokens <= _FEW_TOKENS:
        return sizes
    return tuple(size for size in sizes if size not in (2, 8) or size == buckets[-1])


class GraphedDecoding:
    """Runs `inner`'s steps as graphs.

    buckets: numbers of requests in a round.
    tokens: numbers of prompt tokens in a step; empty if steps with prompt chunks are not captured.
    max_kv_len: longest length that a request can have, with what its rounds in flight may write.
    report: of its captures.
    """

    def __init__(
        self,
        inner: DecodingStrategy,
        slots: SlotTable,
        buckets: Sequence[int],
        max_kv_len: int,
        recorder: Recorder,
        tokens: Sequence[int] = (),
    ) -> None:
        self._inner = inner
        self._slots = slots
        self._buckets = tuple(sorted(buckets))
        self._tokens = tuple(sorted(tokens))
        self._max_kv_len = max_kv_len
        self._recorder = recorder
        self._captured: dict[GraphKey, _Captured] = {}
        self.report = CaptureReport({}, 0)

    @property
    def shapes(self) -> RoundShapes:
        return self._inner.shapes

    @property
    def captured(self) -> frozenset[GraphKey]:
        """The steps that have graphs."""
        return frozenset(self._captured)

    @property
    def num_always_captured(self) -> int:
        """Graphs that are captured whatever they take."""
        return sum(is_always_captured(key) for key in self._keys())

    @property
    def token_buckets(self) -> tuple[int, ...]:
        """Numbers of prompt tokens that captured steps are padded to, ascending."""
        return tuple(sorted({key.tokens for key in self._captured if key.tokens}))

    def capture(
        self, allowance: GraphCapture, group: TPGroup, clock: Callable[[], float] = time.perf_counter
    ) -> CaptureReport:
        """Capture greedy and random rounds, and as far as the allowance goes steps with prompt chunks and the rarer
        kinds of rounds. The same on every rank of `group`: steps run collectives, so that no rank may capture one which
        another leaves out."""
        wanted, rounds = self._keys(), dict[GraphKey, Taken]()
        for key in wanted:
            spent = Taken.together(taken for key, taken in rounds.items() if not is_always_captured(key))
            if not is_always_captured(key) and _is_used_up(allowance, spent, group, self._slots.device):
                break
            since_s, since_bytes = clock(), self._recorder.used_bytes()
            self._captured[key] = self._capture(key)
            num_bytes = self._recorder.used_bytes() - since_bytes
            rounds[key] = Taken(clock() - since_s, num_bytes)
        self.report = CaptureReport(rounds, len(wanted) - len(rounds))
        return self.report

    def _keys(self) -> list[GraphKey]:
        """What is to be captured, in this order: what more requests need first, and of each the largest bucket first,
        so that smaller ones reuse its memory."""
        rounds = [
            GraphKey(shape, shape, bucket, needs)
            for needs in CAPTURED_NEEDS
            for bucket in reversed(buckets_of(needs, self._buckets))
            for shape in range(len(self.shapes))
            if needs in self._kinds(shape) and bucket in self._buckets_of(shape, needs)
        ]
        always = [key for key in rounds if is_always_captured(key)]
        return always + self._chunk_keys() + rounds[len(always) :]

    def _kinds(self, shape: int) -> tuple[SamplingNeeds, ...]:
        """The kinds of sampling that rounds of a shape are captured for."""
        return CAPTURED_NEEDS if shape in self.shapes.unrestricted else BETWEEN_NEEDS

    def _buckets_of(self, shape: int, needs: SamplingNeeds) -> tuple[int, ...]:
        """The buckets that they are captured for."""
        return buckets_of(needs, self._buckets if shape in self.shapes.unrestricted else powers_of_two(self._buckets))

    def _chunk_keys(self) -> list[GraphKey]:
        """Steps with prompt chunks: alone, and beside rounds of the shapes that run there. Those with filters serve all
        but penalties and log-probabilities."""
        alone = [GraphKey(0, self.shapes.default, 0, CHUNK_NEEDS, tokens) for tokens in reversed(self._tokens)]
        return [
            GraphKey(shape, shape, bucket, CHUNK_NEEDS, tokens)
            for bucket in reversed(powers_of_two(self._buckets))
            for shape in reversed(self.shapes.beside_chunks(bucket))
            for tokens in reversed(self._tokens)
            if bucket in buckets_beside(tokens, self._buckets)
        ] + alone

    def _capture(self, key: GraphKey) -> _Captured:
        """Of a batch of padding that runs all that the batches of `key` may need."""
        given = StepInput(key.bucket, key.tokens, self._slots)

        def step() -> StepTensors:
            return self._inner.step(given.batch(key.shape, key.next_shape, self._max_kv_len, key.needs))

        for _ in range(_EAGER_RUNS):
            self._recorder.run_apart(step)
        run, output = self._recorder.record(step)
        return _Captured(run, given, output)

    def step(self, batch: StepBatch) -> StepTensors:
        key = self._key(batch)
        captured = self._captured.get(key) if key is not None else None
        if key is None or captured is None:
            return self._inner.step(batch)
        captured.input.fill(batch)
        captured.run()
        num_finals = batch.chunks.num_finals if batch.chunks is not None else 0
        return _entries(captured.output, batch.num_requests, key.bucket, num_finals)

    def _key(self, batch: StepBatch) -> GraphKey | None:
        """Which graph could run `batch`; None if there is surely none."""
        if batch.chunks is not None:
            return self._chunk_key(batch, batch.chunks)
        shape = batch.shape
        if batch.next_shape not in (0, shape):
            return None
        needs = next((kind for kind in self._kinds(shape) if kind.covers(batch.needs)), None)
        if needs is None:
            return None
        bucket = _fitting(self._buckets_of(shape, needs), batch.num_requests)
        # where nothing is to be drafted, all entries draft for the padding slot
        return None if bucket is None else GraphKey(shape, shape, bucket, needs)

    def _chunk_key(self, batch: StepBatch, chunks: PromptChunks) -> GraphKey | None:
        if chunks.batch.num_chunks > MAX_CHUNKS or not CHUNK_NEEDS.covers(batch.needs):
            return None
        shape = batch.shape if batch.num_requests else self.shapes.default
        if batch.next_shape not in (0, shape):
            return None  # a wider shape would write KV that nobody reserved
        tokens = _fitting(self._tokens, chunks.batch.num_rows)
        if tokens is None:
            return None
        bucket = _fitting((0, *buckets_beside(tokens, self._buckets)), batch.num_requests)
        if bucket is None:
            return None
        return GraphKey(shape if bucket else 0, shape, bucket, CHUNK_NEEDS, tokens)


def _fitting(sizes: Sequence[int], count: int) -> int | None:
    """The smallest of ascending `sizes` that holds `count`."""
    return next((size for size in sizes if size >= count), None)


def _is_used_up(allowance: GraphCapture, spent: Taken, group: TPGroup, device: torch.device) -> bool:
    """Whether any rank has spent the allowance; the same answer on all."""
    mine = torch.tensor((spent.seconds, float(spent.num_bytes)), dtype=torch.float64, device=device)
    seconds, num_bytes = group.all_gather(mine).amax(0).tolist()
    return bool(seconds >= allowance.limit_s or num_bytes >= allowance.limit_gb * 1e9)


def _entries(out: StepTensors, num_requests: int, bucket: int, num_finals: int) -> StepTensors:
    """Of what a captured step emitted for rounds of `bucket` requests and then for chunks: the first `num_requests` of
    the former and the first `num_finals` of the latter."""

    def taken(x: Tensor) -> Tensor:
        if num_finals == 0:
            return x[:num_requests]
        finals = x[bucket : bucket + num_finals]
        return finals if num_requests == 0 else torch.cat((x[:num_requests], finals))

    logprobs = out.logprobs
    if logprobs is not None:
        logprobs = Logprobs(taken(logprobs.chosen), taken(logprobs.top_ids), taken(logprobs.top))
    return StepTensors(taken(out.tokens), taken(out.counts), taken(out.finish), taken(out.accepted), logprobs)
