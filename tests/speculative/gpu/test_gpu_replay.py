"""Captured rounds equal eager ones to the bit: tokens, slots, trees and KV, for every bucket edge, page size and shape,
with padding rows, contexts of 1 to 32768 tokens, and after thousands of replays whose slots change.

On a CPU the same comparison runs eager against eager, and against faults that it must find.
"""

import gc
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aerie.kernels.capability import Capability
from aerie.kernels.slots.finish import FINISH_LENGTH, FINISH_STOP
from aerie.speculative.build import check_device, plan_engine
from aerie.workers.runner.decoding import StepTensors
from aerie.workers.runner.graphs.cuda_graph import GraphedDecoding
from aerie.workers.runner.graphs.graph_keys import bucket_sizes, is_always_captured, powers_of_two
from tests.support.replay import Round, Runner, Twins, as_built, padded_eager
from tests.support.replica import Arm, Dimensions, Replica, build_replica, write_config
from tests.support.slow import slow

CHAIN, TREE = (3, 1, 4), (5, 4, 16)
# `skinny_gemm` serves products of up to 64 rows, with and without columns that it reads ahead (the vocabulary's); 16 KV
# heads fill the device from 8 requests on, so that partial results are merged apart below and by the last from there
ON_GPU = Dimensions(hidden=1024, heads=32, kv_heads=16, head_dim=32, mlp=2048, vocab=8192, draft_vocab=2048)
FOR_LIBRARIES = Dimensions(hidden=1024, heads=16, kv_heads=8, head_dim=64, mlp=2048, vocab=8192, draft_vocab=2048)
TINY = Dimensions(hidden=64, heads=4, kv_heads=2, head_dim=16, mlp=96, vocab=96, draft_vocab=40)

# arm, rounds compared, rounds replayed alone, rounds compared after those
ARMS = {
    "plain-1": (Arm(None, 1), 120, 0, 0),
    "plain-64": (Arm(None, 64), 120, 600, 60),
    "chain-1-real": (Arm(CHAIN, 1), 216, 0, 0),
    "chain-16-synthetic": (Arm(CHAIN, 16, 2.6), 2052, 0, 0),
    "chain-64-real": (Arm(CHAIN, 64), 216, 0, 0),
    "chain-16-fp32": (Arm(CHAIN, 16, dtype="float32"), 108, 0, 0),
    "tree-1-synthetic": (Arm(TREE, 1, 3.4), 216, 0, 0),
    "tree-16-real": (Arm(TREE, 16), 396, 2000, 216),
    "tree-64-synthetic": (Arm(TREE, 64, 3.4), 216, 0, 0),
    "chain-16-adaptive": (Arm(CHAIN, 16, adaptive=True), 400, 400, 200),
    "tree-16-adaptive": (Arm(TREE, 16, 3.4, adaptive=True), 600, 600, 300),
    "chain-16-flashinfer": (Arm(CHAIN, 16, 2.6, backends=("flashinfer",) * 3), 216, 200, 108),
    "tree-16-flashinfer": (Arm(TREE, 16, 3.4, backends=("flashinfer",) * 3), 396, 400, 216),
    "chain-16-trtllm": (Arm(CHAIN, 16, 2.6, backends=("trtllm",) * 3), 216, 200, 108),
    "tree-16-trtllm": (Arm(TREE, 16, 3.4, backends=("trtllm", "trtllm", "triton")), 396, 400, 216),
}


def bucket_edges(num_slots: int) -> list[int]:
    """Each bucket and one request less and more, as far as there are slots."""
    edges = {bucket + d for bucket in bucket_sizes(num_slots) for d in (-1, 0, 1)}
    return sorted(n for n in edges if 1 <= n <= num_slots)


def written(folder: Path, arm: Arm, size: Dimensions) -> None:
    """The checkpoints' config.json, with a head that reads layers which so few have."""
    write_config(folder, size, arm.longest + 4096, (0, size.layers // 2 - 1, size.layers - 2))


def twins(folder: Path, arm: Arm, size: Dimensions, run_first: Runner) -> Twins:
    """Return two replicas on one GPU, the first with CUDA graphs."""
    on_gpu = torch.cuda.is_available() and size is not TINY
    written(folder, arm, size)
    device = "cuda" if on_gpu else "cpu"
    first, second = (build_replica(arm.spec(folder, device, graphs)) for graphs in (on_gpu, False))
    return Twins(arm, first, second, run_first, padded_eager(bucket_sizes(arm.num_slots)))


def size_of(arm: Arm) -> Dimensions:
    """FlashInfer's kernels have larger heads."""
    return FOR_LIBRARIES if set(arm.backends) - {"auto"} else ON_GPU


@pytest.mark.parametrize("name", list(ARMS))
def test_every_arm_is_a_mix_that_hopper_serves(name: str, tmp_path: Path) -> None:
    arm = ARMS[name][0]
    written(tmp_path, arm, size_of(arm))
    spec = arm.spec(tmp_path, "cpu", False)
    check_device(spec, plan_engine(spec), Capability("cuda", (9, 0)), here=False)


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("name", list(ARMS))
def test_replays_equal_eager_rounds(name: str, tmp_path: Path) -> None:
    arm, num_compared, num_alone, num_after = ARMS[name]
    if size_of(arm) is FOR_LIBRARIES:
        pytest.importorskip("flashinfer", reason="flashinfer is not installed here")
    sizes = bucket_edges(arm.num_slots)
    started_s = time.perf_counter()
    pair = twins(tmp_path, arm, size_of(arm), as_built)
    built_s = time.perf_counter()
    graphs = pair.first.strategy
    assert isinstance(graphs, GraphedDecoding)
    captured = graphs.captured
    pair.compare(sizes, num_compared)
    assert pair.different_kv() == []
    compared_s = time.perf_counter()
    if num_alone:
        pair.replay(sizes, num_alone)
        pair.compare(sizes, num_after)
        assert pair.different_kv() == []
    print(
        f"{name}: built in {built_s - started_s:.1f} s, compared in {compared_s - built_s:.1f} s, the rest in "
        f"{time.perf_counter() - compared_s:.1f} s; {pair.seen.requests} requests, acceptance length "
        f"{pair.seen.acceptance_length:.2f}, accepted {sorted(pair.seen.accepted.items())}"
    )
    _assert_covered(pair, arm, sizes)
    always = [key for key in captured if is_always_captured(key)]
    buckets, between = bucket_sizes(arm.num_slots), len(graphs.shapes) - len(graphs.shapes.unrestricted)
    num_always = len(graphs.shapes.unrestricted) * 2 * len(buckets) + between * len(powers_of_two(buckets))
    assert graphs.captured == captured and len(always) == num_always
    del pair, graphs, captured
    gc.collect()
    torch.cuda.empty_cache()


def _assert_covered(pair: Twins, arm: Arm, sizes: list[int]) -> None:
    """The comparison means something only if drafts are accepted, requests end, and every graph is replayed."""
    shapes = pair.first.strategy.shapes
    assert len(pair.seen.rounds) == (len(shapes) + len(shapes.unrestricted)) * len(sizes)
    assert pair.seen.finish[FINISH_STOP] and pair.seen.finish[FINISH_LENGTH]
    assert pair.seen.requests > 2 * arm.num_slots
    if arm.tree is not None:
        assert -1 in pair.seen.accepted and len(pair.seen.accepted) >= 3
        # a synthetic length is not reached where trees are shallower
        assert pair.seen.acceptance_length > (1.5 if arm.acceptance else 1.02)


def small(
    tree: tuple[int, int, int] | None, page_size: int, acceptance: float | None = None, adaptive: bool = False
) -> Arm:
    return Arm(tree, page_size, acceptance, dtype="float32", num_slots=5, longest=90, adaptive=adaptive)


SMALL = {
    "plain": small(None, 4),
    "chain": small(CHAIN, 1),
    "chain-synthetic": small(CHAIN, 4, 2.6),
    "tree": small(TREE, 16),
    "tree-synthetic": small(TREE, 4, 3.4),
    "chain-adaptive": small(CHAIN, 4, adaptive=True),
    "tree-adaptive": small(TREE, 4, 3.4, adaptive=True),
}


def in_buckets(num_slots: int) -> Runner:
    return padded_eager(bucket_sizes(num_slots))


@torch.inference_mode()
@pytest.mark.slow  # the harness of GPU tests; one of its faults stays
@pytest.mark.parametrize("name", SMALL)
def test_eager_rounds_equal_eager_rounds(name: str, tmp_path: Path) -> None:
    """The harness itself: requests end and begin, all kinds of rounds occur, and equal replicas stay equal, also after
    rounds of one alone."""
    arm = SMALL[name]
    sizes = bucket_edges(arm.num_slots)
    pair = twins(tmp_path, arm, TINY, in_buckets(arm.num_slots))
    pair.compare(sizes, 40 if arm.tree else 240)  # until stop tokens were drawn
    assert pair.different_kv() == []
    pair.replay(sizes, 20)
    assert pair.different_state() == [] and pair.different_kv() == []
    pair.compare(sizes, 20)
    assert pair.different_kv() == []
    _assert_covered(pair, arm, sizes)


def late_slots(num_slots: int) -> Runner:
    """A replay that still runs the first slots that it saw of each size."""
    seen: dict[tuple[int, int, bool], Round] = {}
    run = in_buckets(num_slots)

    def stale(replica: Replica, round_: Round) -> StepTensors:
        return run(replica, seen.setdefault((len(round_.slots), round_.shape, round_.random), round_))

    return stale


def next_as_padding(num_slots: int) -> Runner:
    """Rows behind the batch that are not the padding slot, but one whose request is not in the round."""
    run = in_buckets(num_slots)

    def leaking(replica: Replica, round_: Round) -> StepTensors:
        bucket = next(size for size in bucket_sizes(num_slots) if size >= len(round_.slots))
        others = [slot for slot in range(num_slots) if slot not in round_.slots]
        slots = (*round_.slots, *others[: bucket - len(round_.slots)])
        return run(replica, Round(slots, round_.shape, round_.random))

    return leaking


@torch.inference_mode()
@pytest.mark.parametrize("fault", [late_slots, *slow(next_as_padding)])
def test_wrong_slots_are_found(fault: Callable[[int], Runner], tmp_path: Path) -> None:
    arm = SMALL["chain"]
    pair = twins(tmp_path, arm, TINY, fault(arm.num_slots))
    with pytest.raises(AssertionError, match="round"):
        pair.compare(bucket_edges(arm.num_slots), 60)


@pytest.mark.slow  # as above
@torch.inference_mode()
def test_other_numbers_in_the_cache_are_found(tmp_path: Path) -> None:
    """One token's keys of one layer: found in the pools at once, and after few rounds in what is emitted."""
    arm = SMALL["tree-synthetic"]
    pair = twins(tmp_path, arm, TINY, in_buckets(arm.num_slots))
    first = pair.first
    page = int(first.slots.page_table[2, 0])
    first.pools[0].layer(1).k[page, 0] += 5.0
    assert pair.different_kv() == ["pool 0 layer 1 k"]
    with pytest.raises(AssertionError, match="round"):
        pair.compare(bucket_edges(arm.num_slots), 60)
