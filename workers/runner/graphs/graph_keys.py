"""Defines which steps are captured as CUDA graphs, and which graph runs a batch. Pure; used by `cuda_graph`.

A graph drafts the tree shape that it verifies. A round may verify a tree of another shape than was drafted
(`aerie.speculative.tree_table`). So changes of shape need no graphs of their own: S shapes take S graphs per batch size
and kind of sampling, not S squared.

Shapes other than the default and non-speculative decoding (`RoundShapes.unrestricted`) have fewer graphs:
- Batches are padded to powers of two.
- Greedy batches run the graphs of random sampling. That costs 0.03 of 5 ms at batch 1, and 0.1 of 10 ms at 64.
- Batches with penalties, log-probabilities or grammars have none: the scheduler never chooses these shapes for them.

Number of graphs for 64 slots, and in brackets the number added by grammars:

rounds of                 alone      with prompt chunks
no request                -          12 (4)
non-speculative decoding  43 (21)    36 (8)
the default shape         43 (21) 96 (16); 102 with the chain that replaces a tree in large batches
any other shape           14         -

Steps in which a request has an adapter have graphs of their own, so that all others run the same graphs as in an engine
without adapters: of every shape and kind of sampling except greedy, for powers of two of requests.

Graphs for many prompt tokens expand the latent rows of MLA models (`aerie.attention.expansion`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from aerie.workers.config import FEW_REQUESTS, RoundShapes
from aerie.workers.runner.batch import StepBatch
from aerie.workers.runner.graphs.graph_inputs import MAX_CHUNKS
from aerie.workers.sampling import CAPTURED_NEEDS, SamplingNeeds

TOKEN_BUCKETS = (16, 64, 128, 256, 384, 512, 640, 768, 896, 1024, 1536, 2048)  # prompt tokens; see `token_buckets`
# Minimum prompt tokens of graphs with expansion, from which on it is estimated to be faster (in a prompt's first chunk,
# equally fast).
EXPANDED_TOKENS = 384
EXPANDED_SEEN = 16384  # maximum tokens that a step's expanded chunks attend to; bounds memory for their keys and values
FIRST_TOKENS = (256, 512, 768, 1024)  # prompt tokens of the mixed batches that a start waits for
EAGER_ROWS = 1024  # rows whose time equals the extra time of an eager step
_MIN_SAVED_ROWS = 32  # a tenth of a millisecond each on Llama-2-70B, two cards; see `mixed_buckets`
_FEW_TOKENS = 512  # maximum tokens of mixed batches that are captured for every power of two of requests
GREEDY = SamplingNeeds(random=False)
RANDOM = SamplingNeeds(random=True)
# Steps with chunks have only graphs with filters: filters cost 0.1 ms, a step without a graph 25 ms.
CHUNK_NEEDS = SamplingNeeds(random=True, filtered=True)
BETWEEN_NEEDS = (RANDOM, CHUNK_NEEDS)  # for shapes between non-speculative decoding and the default
MASKED_CHUNK_NEEDS = SamplingNeeds(random=True, filtered=True, masked=True)


@dataclass(frozen=True)
class GraphKey:
    """The key of one graph.

    shape, next_shape: indexes of the tree shapes that its rounds verify and draft.
    bucket: maximum requests that run a round.
    needs: sampling needs. Batches with fewer needs can use the graph, too.
    tokens: maximum prompt tokens.
    seen: EXPANDED_SEEN if the chunks' latent rows are expanded, else 0.
    adapted: whether any request has an adapter.
    """

    shape: int
    next_shape: int
    bucket: int
    needs: SamplingNeeds
    tokens: int = 0
    seen: int = 0
    adapted: bool = False


def bucket_sizes(max_running: int) -> tuple[int, ...]:
    """Return the batch sizes to capture: 1, 2, 4, multiples of 8 to 64, of 16 to 256, of 32 beyond, and max_running."""
    sizes, size = [1, 2, 4], 8
    while size < max_running:
        sizes.append(size)
        size += 8 if size < 64 else 16 if size < 256 else 32
    return tuple([s for s in sizes if s < max_running] + [max_running])


def is_always_captured(key: GraphKey) -> bool:
    """Return whether the graph is exempt from the memory limit: greedy rounds, and random rounds without filters."""
    return key.tokens == 0 and not key.needs.full_logits and not key.needs.masked and not key.adapted


def buckets_of(needs: SamplingNeeds, buckets: Sequence[int]) -> tuple[int, ...]:
    """Return the ascending buckets for rounds with `needs`: all; for rarer needs only powers of two and the largest,
    which pads a batch to at most twice its size."""
    return powers_of_two(buckets) if needs.full_logits or needs.masked else tuple(buckets)


def powers_of_two(buckets: Sequence[int]) -> tuple[int, ...]:
    """Return the powers of two among ascending buckets, and the largest bucket."""
    return tuple(size for size in buckets if size & (size - 1) == 0 or size == buckets[-1])


def token_buckets(max_step_tokens: int) -> tuple[int, ...]:
    """Return the captured numbers of prompt tokens.

    There is no size between 16 and 64, because 64 rows take hardly longer than 16: reading the weights dominates. There
    is none above 2,048, because time is proportional to tokens there, so two steps are as fast. Longer steps would run
    eagerly, which occupies the host for 25 to 90 ms.
    """
    largest = min(max_step_tokens, TOKEN_BUCKETS[-1])
    return (*(size for size in TOKEN_BUCKETS if size < largest), largest)


def mixed_buckets(num_tokens: int, buckets: Sequence[int], width: int = 1) -> tuple[int, ...]:
    """Return the batch buckets captured together with `num_tokens` prompt tokens, for rounds that verify `width` rows
    of a request: powers of two; above 512 tokens, where the padding of a few requests costs little, without 2 and 8;
    and three quarters of a power of two where they save at least `_MIN_SAVED_ROWS`."""
    sizes = set(powers_of_two(buckets))
    if num_tokens > _FEW_TOKENS:
        sizes -= {2, 8} - {buckets[-1]}
    between = {3 * size // 4 for size in buckets if size & (size - 1) == 0 and size // 4 * width >= _MIN_SAVED_ROWS}
    return tuple(sorted(sizes | between & set(buckets)))


def serves(captured: GraphKey, key: GraphKey) -> bool:
    """Return whether the graph `captured` can run all batches of `key`, with more padding.

    Steps with only chunks can use a graph with rounds, but steps with only rounds cannot use a graph with chunks. Steps
    with and without grammar masks cannot share graphs, because a step with masks is two graphs.
    """
    return (
        captured.next_shape == key.next_shape
        and (captured.shape == key.shape or key.bucket == 0)
        and captured.bucket >= key.bucket
        and captured.tokens >= key.tokens
        and (captured.tokens > 0) == (key.tokens > 0)
        and captured.seen == key.seen
        and captured.adapted == key.adapted
        and captured.needs.masked == key.needs.masked
        and captured.needs.covers(key.needs)
    )


class GraphKeys:
    """The keys of an engine's graphs.

    shapes: tree shapes of its rounds.
    buckets: batch sizes to capture.
    tokens: numbers of prompt tokens to capture; empty if steps with prompt chunks are not captured.
    expands: whether steps with many prompt tokens expand latent rows.
    adapts: whether the engine has adapters.
    """

    def __init__(
        self,
        shapes: RoundShapes,
        buckets: Sequence[int],
        tokens: Sequence[int],
        expands: bool = False,
        adapts: bool = False,
    ) -> None:
        self._adapts = adapts
        self._shapes = shapes
        self._expands = expands
        self.buckets = tuple(sorted(buckets))
        self.tokens = tuple(sorted(tokens))

    def wanted(self) -> list[GraphKey]:
        """Return the keys to capture: common kinds first, and within a kind the largest batch first, so that smaller
        ones reuse its memory."""
        rounds = [
            GraphKey(shape, shape, bucket, needs)
            for needs in CAPTURED_NEEDS
            for bucket in reversed(buckets_of(needs, self.buckets))
            for shape in range(len(self._shapes))
            if needs in self._kinds(shape) and bucket in self._buckets_of(shape, needs)
        ]
        always = [key for key in rounds if is_always_captured(key)]
        rare = [key for key in rounds if not is_always_captured(key)]
        chunks, masked = self._chunk_keys(CHUNK_NEEDS), self._chunk_keys(MASKED_CHUNK_NEEDS)
        if not self._adapts:
            return always + chunks + rare + masked
        adapted = [replace(key, adapted=True) for key in (*rounds, *chunks, *masked) if self._is_adapted(key)]
        prompt_keys = [key for key in adapted if not key.needs.masked]
        return always + chunks + prompt_keys + rare + masked + [key for key in adapted if key.needs.masked]

    def _is_adapted(self, key: GraphKey) -> bool:
        """Return whether there is such a graph with adapters."""
        return key.needs != GREEDY and (key.tokens > 0 or key.bucket in powers_of_two(self.buckets))

    def first(self, measured: Iterable[tuple[int, int, int, int]]) -> frozenset[GraphKey]:
        """Return the keys that a start waits for:

        - steps whose time it measures (`cost_points.measured_steps`);
        - mixed batches that cover most steps under load;
        - rounds of one, `FEW_REQUESTS` and all requests with filters, which many clients use;
        - greedy rounds of one request, so that their kernels are compiled before the first request.

        measured: the result of `measured_steps`.
        """
        keys = [
            self.chunk_key(shape, count, tokens, CHUNK_NEEDS, tokens + before)
            if tokens
            else self.round_key(shape, count, RANDOM)
            for shape, count, tokens, before in measured
        ]
        keys += [
            self.chunk_key(self._shapes.largest_mixed_shape(count), count, tokens, CHUNK_NEEDS)
            for tokens in FIRST_TOKENS
            if tokens in self.tokens
            for count in mixed_buckets(FIRST_TOKENS[-1], self.buckets, width=0)
        ]
        sizes = (1, min(FEW_REQUESTS, self.buckets[-1]), self.buckets[-1])
        for shape in self._shapes.unrestricted:
            keys += [self.round_key(shape, size, CHUNK_NEEDS) for size in sizes]
            keys.append(self.round_key(shape, 1, GREEDY))
            keys += [self.round_key(shape, size, CHUNK_NEEDS, True) for size in sizes if self._adapts]
        if self._adapts and self.tokens:
            max_batch, tokens = self.buckets[-1], min(FIRST_TOKENS[-1], self.tokens[-1])
            keys.append(
                self.chunk_key(self._shapes.largest_mixed_shape(max_batch), max_batch, tokens, CHUNK_NEEDS, 0, True)
            )
        return frozenset(key for key in keys if key is not None)

    def first_masked(self) -> list[GraphKey]:
        """Return steps that launch all kernels of steps with grammar masks. With expansion, they include the one with
        the most prompt tokens, because masked steps never expand."""
        kinds = [needs for needs in CAPTURED_NEEDS if needs.masked]
        keys = [self.round_key(self._shapes.default, 1, needs) for needs in (kinds[0], kinds[-1])]
        if self._expands and self.tokens:
            keys.append(self.chunk_key(self._shapes.default, 0, self.tokens[-1], MASKED_CHUNK_NEEDS))
        return [key for key in keys if key is not None]

    def _seen_of(self, tokens: int, needs: SamplingNeeds) -> int:
        """Return `GraphKey.seen` of steps with `tokens` prompt tokens."""
        return EXPANDED_SEEN if self._expands and tokens >= EXPANDED_TOKENS and not needs.masked else 0

    def _kinds(self, shape: int, adapted: bool = False) -> tuple[SamplingNeeds, ...]:
        """Return the captured sampling needs of rounds of a shape."""
        kinds = CAPTURED_NEEDS if shape in self._shapes.unrestricted else BETWEEN_NEEDS
        return tuple(kind for kind in kinds if kind != GREEDY) if adapted else kinds

    def _buckets_of(self, shape: int, needs: SamplingNeeds, adapted: bool = False) -> tuple[int, ...]:
        """Return the captured batch sizes of rounds of a shape."""
        has_all = shape in self._shapes.unrestricted and not adapted
        return buckets_of(needs, self.buckets if has_all else powers_of_two(self.buckets))

    def _chunk_keys(self, needs: SamplingNeeds) -> list[GraphKey]:
        """Return the keys of steps with prompt chunks: with rounds (`RoundShapes.mixed_shapes`), then alone. Large ones
        come first, as in `wanted`."""
        sizes, default = self._tokens_of(needs)[::-1], self._shapes.default
        alone = [
            GraphKey(shape=0, next_shape=default, bucket=0, needs=needs, tokens=size, seen=self._seen_of(size, needs))
            for size in sizes
        ]
        return [
            GraphKey(shape, shape, bucket=bucket, needs=needs, tokens=tokens, seen=self._seen_of(tokens, needs))
            for bucket in reversed(self.buckets)
            for shape in reversed(self._shapes.mixed_shapes(bucket, needs.masked))
            for tokens in sizes
            if bucket in self._mixed_buckets(shape, tokens, needs)
        ] + alone

    def _tokens_of(self, needs: SamplingNeeds) -> tuple[int, ...]:
        """Return the captured numbers of prompt tokens of steps with `needs`. With grammars these are every third one,
        because captures take time and such prompts are rare."""
        return self.tokens[::-1][::3][::-1] if needs.masked else self.tokens

    def _mixed_buckets(self, shape: int, num_tokens: int, needs: SamplingNeeds) -> tuple[int, ...]:
        """Return the captured batch sizes of mixed batches. With grammars these are every second power of two. Without,
        FEW_REQUESTS is added if it is the limit for a shape."""
        if needs.masked:
            return powers_of_two(self.buckets)[::-1][::2][::-1]
        sizes = mixed_buckets(num_tokens, self.buckets, self._shapes[shape].width)
        few_shapes, many_shapes = (self._shapes.mixed_shapes(count) for count in (FEW_REQUESTS, self.buckets[-1]))
        return sizes if set(few_shapes) <= set(many_shapes) else tuple(sorted({*sizes, FEW_REQUESTS}))

    def of(self, batch: StepBatch) -> GraphKey | None:
        """Return the key of the smallest graph that can run `batch`, captured or not; None if none can."""
        if batch.is_eager:
            return None
        shape, needs = batch.shape, batch.needs
        if batch.chunks is not None:
            shape = shape if batch.num_requests else self._shapes.default
        if batch.next_shape not in (0, shape):
            return None  # the graph drafts `shape`, for whose KV the plan may not have reserved pages
        if batch.chunks is None:
            return self.round_key(shape, batch.num_requests, needs, batch.adapted)
        rows = batch.chunks.batch
        if rows.num_chunks > MAX_CHUNKS:
            return None
        return self.chunk_key(
            shape, batch.num_requests, rows.num_rows, needs, sum(rows.host_lists.num_attended), batch.adapted
        )

    def round_key(self, shape: int, num_requests: int, needs: SamplingNeeds, adapted: bool = False) -> GraphKey | None:
        """Return the key of a step without prompt tokens; None if no graph can run it."""
        kind = next((kind for kind in self._kinds(shape, adapted) if kind.covers(needs)), None)
        if kind is None:
            return None
        bucket = _padded_size(self._buckets_of(shape, kind, adapted), num_requests)
        # if the batch does not draft, all entries draft in the padding slot
        return None if bucket is None else GraphKey(shape, shape, bucket, kind, adapted=adapted)

    def chunk_key(
        self,
        shape: int,
        num_requests: int,
        num_tokens: int,
        needs: SamplingNeeds,
        num_seen: int = 0,
        adapted: bool = False,
    ) -> GraphKey | None:
        """Return the key of a step with prompt tokens; None if no graph can run it.

        shape: index of the tree shape to verify and draft.
        num_seen: tokens that the chunks attend to, including their own.
        """
        kind = MASKED_CHUNK_NEEDS if needs.masked else CHUNK_NEEDS
        tokens = _padded_size(self._tokens_of(kind), num_tokens)
        if tokens is None or not kind.covers(needs):
            return None
        bucket = _padded_size((0, *self._mixed_buckets(shape, tokens, kind)), num_requests)
        seen = self._seen_of(tokens, kind)
        if bucket is None or 0 < seen < num_seen:
            return None
        return GraphKey(
            shape if bucket else 0, shape, bucket=bucket, needs=kind, tokens=tokens, seen=seen, adapted=adapted
        )

    def fallback(self, key: GraphKey, captured: Iterable[GraphKey]) -> GraphKey | None:
        """Return the graph with the fewest rows in `captured` that can run the batches of `key`; None if none can."""
        return min((other for other in captured if serves(other, key)), key=self._work, default=None)

    def padding_rows(self, key: GraphKey, used: GraphKey | None) -> int:
        """Return the additional rows of the graph `used`, compared with the graph `key`. used: None if the step ran
        eagerly."""
        return EAGER_ROWS if used is None else self._work(used)[0] - self._work(key)[0]

    def _work(self, key: GraphKey) -> tuple[int, int]:
        """Return a sort key of a graph's cost: (rows, index of the sampling needs)."""
        rows = key.bucket * self._shapes[key.shape].width + key.tokens
        return rows, CAPTURED_NEEDS.index(key.needs)


def _padded_size(sizes: Sequence[int], count: int) -> int | None:
    """Return the smallest of ascending `sizes` that is at least `count`; None if there is none."""
    return next((size for size in sizes if size >= count), None)
