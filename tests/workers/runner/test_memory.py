"""How a rank's memory is divided: by arithmetic over a device that is only described, and on a CPU for real."""

import dataclasses
import gc
import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from aerie.attention.config import CacheConfig
from aerie.attention.expansion import MAX_TOKENS, pays
from aerie.kernels.kv.batches import ChunkLists
from aerie.speculative.build import EngineSpec, plan_engine
from aerie.workers.config import GraphCapture, LoraConfig, ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.engine_layout import EngineLayout, snapshot_share
from aerie.workers.runner.graphs.warm_up import largest_steps
from aerie.workers.runner.memory import GRAPH_BYTES, HostMemory, RankMemory, StepPeaks, slots_for, wait_until_free
from aerie.workers.scheduling.plan import GraphCount, StepPlan, unpack_i32
from tests.bench.models.configured import write_config
from tests.support.embedded import TREE, embedded_spec
from tests.support.thread_group import on_ranks

GB = 10**9
GPU = torch.device("cuda")  # never touched


class DescribedMemory:
    """A device of `total` bytes of which others have `others`; the rank takes what the test adds to `taken`."""

    def __init__(self, total: int, others: int = 0) -> None:
        self.size, self.others, self.taken = total, others, 0

    def total(self) -> int:
        return self.size

    def used(self) -> int:
        return self.others + self.taken

    def free(self) -> int:
        return self.size - self.used()

    def peak_of(self, run: Callable[[], None]) -> int:
        raise AssertionError("nothing is run here")


def settings(**changes: object) -> tuple[WorkerConfig, EngineLayout]:
    """An engine with `cache`, `scheduler` and others as given, and a round layout: 10 kB a page, 1 MB a slot."""
    worker = dataclasses.replace(embedded_spec(TREE).worker, **{"cache": CacheConfig(), **changes})  # type: ignore[arg-type]
    layout = plan_engine(EngineSpec(worker)).layout
    return worker, dataclasses.replace(layout, bytes_per_page=10_000, bytes_per_slot=10**6)


def settled(
    worker: WorkerConfig, layout: EngineLayout, memory: DescribedMemory, weights: int, group: TPGroup = SOLO
) -> tuple[EngineLayout, RankMemory]:
    """As `build_rank` goes about it: 3 GB are the peak of steps, 1 of them of rounds, and 10 graphs are certain."""
    rank = RankMemory(memory, worker, layout, GPU if group is SOLO else torch.device("cpu"))
    with rank.counting_weights():
        memory.taken += weights
    layout = rank.settle_slots(layout, group)
    memory.taken += layout.slot_bytes
    return rank.settle_pages(layout, group, StepPeaks(GB, 3 * GB), num_graphs=10), rank


def test_kv_gets_what_nothing_else_needs() -> None:
    worker, layout = settings(scheduler=SchedulerConfig(max_running=99), graph_capture=GraphCapture(limit_gb=2.0))
    memory = DescribedMemory(80 * GB, others=GB)
    layout, rank = settled(worker, layout, memory, weights=16 * GB)
    left = int(0.9 * 79 * GB) - 16 * GB - 100 * 10**6 - 3 * GB - (10 * GRAPH_BYTES + GB + 2 * GB)
    assert layout.num_pages == left // 10_000 - 1
    memory.taken += (layout.num_pages + 1) * 10_000 + GB // 2
    rank.kv_allocated()
    memory.taken += 4 * 10**8
    use = rank.use(layout, GraphCount(10), SOLO)
    assert (use.total, use.others, use.weights, use.tables) == (80 * GB, GB, 16 * GB, 10**8)
    assert (use.workspaces, use.activations, use.graphs) == (GB // 2, 3 * GB, 4 * 10**8)
    assert use.rank_total == memory.taken + 3 * GB and use.left == memory.free() - 3 * GB > 0.1 * 79 * GB
    following, kept = rank.use(layout, GraphCount(4, 6), SOLO), 10 * GRAPH_BYTES + GB + 2 * GB
    assert following.graphs == kept, "graphs that are captured later take no other's memory"
    assert following.left == use.left - (kept - 4 * 10**8)


@pytest.mark.parametrize(
    "cache, snapshots, pages",
    [
        (CacheConfig(memory_gb=40.0), 133, (40 * GB - 10**8 - 133 * 150 * 10**6) // 10_000 - 1),
        (CacheConfig(memory_gb=40.0, state_snapshots=7), 7, (40 * GB - 10**8 - 7 * 150 * 10**6) // 10_000 - 1),
        (CacheConfig(num_pages=400_000), 26, 400_000),
        (CacheConfig(memory_gb=40.0, prefix_cache=False), 0, (40 * GB - 10**8) // 10_000 - 1),
        (CacheConfig(), None, None),
    ],
)
def test_saved_states_take_at_most_half_of_the_memory_for_kv(
    cache: CacheConfig, snapshots: int | None, pages: int | None
) -> None:
    worker, layout = settings(scheduler=SchedulerConfig(max_running=99), cache=cache)
    layout = dataclasses.replace(layout, bytes_per_snapshot=150 * 10**6)
    found, rank = settled(worker, layout, DescribedMemory(80 * GB), weights=16 * GB)
    if snapshots is None:  # what is left
        left = found.saved_bytes + (found.num_pages + 1) * 10_000
        assert 0.5 * left - 150 * 10**6 < found.saved_bytes <= 0.5 * left + 10_000
    else:
        assert (found.num_snapshots, found.num_pages) == (snapshots, pages)
    without = dataclasses.replace(layout, bytes_per_snapshot=0)
    assert settled(worker, without, DescribedMemory(80 * GB), weights=16 * GB)[0].num_snapshots == 0


@pytest.mark.parametrize(
    "per_snapshot, per_token, share",
    [(154 * 10**6, 69_632, 0.21), (77 * 10**6, 69_632, 0.2), (65 * 10**6, 22_528, 0.26), (10**4, 69_632, 0.2)],
    ids=["27B", "27B in bfloat16", "35B-A3B", "small states"],
)
def test_there_is_a_saved_state_for_8192_tokens_of_kv(per_snapshot: int, per_token: int, share: float) -> None:
    assert snapshot_share(per_snapshot, 16 * per_token, 16) == pytest.approx(share, abs=0.005)
    if share > 0.2:
        snapshots = share * 62e9 / per_snapshot
        assert (1 - share) * 62e9 / per_token / snapshots == pytest.approx(8192, rel=0.02)


def test_saved_states_that_leave_no_page_are_named() -> None:
    worker, layout = settings(scheduler=SchedulerConfig(max_running=9), cache=CacheConfig(state_snapshots=999))
    layout = dataclasses.replace(layout, bytes_per_snapshot=150 * 10**6)
    with pytest.raises(ValueError, match=r"only 0 KV pages .*149.85 GB for cache.state_snapshots; configure less"):
        settled(worker, layout, DescribedMemory(80 * GB), weights=16 * GB)


def test_a_small_gpu_keeps_less_for_graphs() -> None:
    worker, layout = settings(graph_capture=GraphCapture(limit_s=7, limit_gb=2.0))
    for total_gb, limit_gb in ((80, 2.0), (20, 1.0)):
        rank = RankMemory(DescribedMemory(total_gb * GB), worker, layout, GPU)
        assert rank.capture_limits(SOLO) == GraphCapture(limit_s=7, limit_gb=limit_gb)


@pytest.mark.parametrize(
    ("total_gb", "weights_gb", "num_slots", "limit_gb"),
    [
        (140, 16, None, 6.0),  # as configured
        (140, 69, 200, 6.0),
        (140, 100, None, 4.0),  # a tenth of what weights leave
        (80, 69, None, 2.0),
        (80, 16, 200, 4.0),  # a twentieth of the memory
        (140, 16, 100, 3.0),  # 30 MB a request
        (140, 16, 8, 2.0),
    ],
)
def test_large_weights_and_few_requests_leave_less_for_graphs(
    total_gb: int, weights_gb: int, num_slots: int | None, limit_gb: float
) -> None:
    worker, layout = settings()
    memory = DescribedMemory(total_gb * GB)
    rank = RankMemory(memory, worker, layout, GPU)
    with rank.counting_weights():
        memory.taken += weights_gb * GB
    assert rank.capture_limits(SOLO, num_slots) == GraphCapture(limit_gb=limit_gb)


def test_others_on_the_gpu_leave_less() -> None:
    worker, layout = settings(scheduler=SchedulerConfig(max_running=8), graph_capture=GraphCapture(limit_gb=2.0))
    alone = settled(worker, layout, DescribedMemory(80 * GB), weights=10 * GB)[0].num_pages
    beside = settled(worker, layout, DescribedMemory(80 * GB, others=40 * GB), weights=10 * GB)[0].num_pages
    assert alone - beside == 0.9 * 40 * GB / 10_000


@pytest.mark.parametrize("cache", [CacheConfig(num_pages=10**7), CacheConfig(memory_gb=100.0)], ids=["pages", "GB"])
def test_a_number_that_does_not_fit_is_refused_with_one_that_does(cache: CacheConfig) -> None:
    worker, layout = settings(scheduler=SchedulerConfig(max_running=9), cache=cache)
    fits = r"cache\.(num_pages|memory_gb)=.* pages take .*, but only (\d+) KV pages \(.* fit"
    with pytest.raises(ValueError, match=fits) as error:
        settled(worker, layout, DescribedMemory(80 * GB), weights=16 * GB)
    for remedy in ("parallel.tensor_parallel", "cache.memory_share", "max_running", "max_step_tokens", "limit_gb"):
        assert remedy in str(error.value)
    fitting = int(str(error.value).split(", but only ")[1].split()[0])
    worker, layout = settings(scheduler=SchedulerConfig(max_running=9), cache=CacheConfig(num_pages=fitting))
    assert settled(worker, layout, DescribedMemory(80 * GB), weights=16 * GB)[0].num_pages == fitting
    _, layout = settings(scheduler=SchedulerConfig(max_running=9), cache=CacheConfig(num_pages=fitting + 1))
    worker = dataclasses.replace(worker, cache=CacheConfig(num_pages=fitting + 1))
    with pytest.raises(ValueError, match="configure less, or raise"):
        settled(worker, layout, DescribedMemory(80 * GB), weights=16 * GB)


def test_nothing_left_is_refused() -> None:
    worker, layout = settings(scheduler=SchedulerConfig(max_running=9))
    with pytest.raises(ValueError, match=r"cache\.memory_gb=auto: only 0 KV pages \(.*in addition to 15.01 GB in use"):
        settled(worker, layout, DescribedMemory(16 * GB), weights=15 * GB)


def test_ranks_settle_on_the_least() -> None:
    worker, layout = settings()

    def settle(group: TPGroup) -> EngineLayout:
        return settled(worker, layout, DescribedMemory((80, 20)[group.rank] * GB), 9 * GB, group)[0]

    first, second = on_ranks(2, settle)
    (alone,) = on_ranks(1, lambda group: settled(worker, layout, DescribedMemory(20 * GB), 9 * GB, group)[0])
    (roomy,) = on_ranks(1, lambda group: settled(worker, layout, DescribedMemory(80 * GB), 9 * GB, group)[0])
    assert first == second == alone and 2 < alone.num_pages < roomy.num_pages


@pytest.mark.parametrize(
    "kv_gb,device,slots",
    [(-5, "cuda", 8), (0.1, "cuda", 8), (15, "cuda", 8), (16, "cuda", 16), (100, "cuda", 64), (999, "cuda", 256)]
    + [(15, "cpu", 8), (33, "cpu", 32), (999, "cpu", 32)],
)
def test_slots_are_a_power_of_two_of_typical_requests(kv_gb: float, device: str, slots: int) -> None:
    assert slots_for(int(kv_gb * GB), GB, device) == slots


def test_a_replacement_measures_nothing_and_waits_for_the_memory_of_the_dead() -> None:
    worker, layout = settings(scheduler=SchedulerConfig())
    layout = layout.with_slots(16).with_pages(77)
    assert (layout.num_pages, layout.scheduler.num_slots, layout.slot_bytes) == (77, 16, 17 * 10**6)
    memory, slept = DescribedMemory(8 * GB, others=6 * GB), [0.0]

    def sleep(seconds: float) -> None:
        slept[0] += seconds
        memory.others -= GB if slept[0] > 1 else 0

    wait_until_free(memory, 5 * GB, clock=lambda: slept[0], sleep=sleep)
    assert memory.free() == 5 * GB and 1 < slept[0] < 2
    wait_until_free(memory, 9 * GB, clock=lambda: slept[0], sleep=lambda seconds: slept.__setitem__(0, slept[0] + 1))
    assert 10 < slept[0] < 13


@pytest.mark.parametrize("num_slots,tokens,max_len", [(3, 7, 64), (5, 2, 64), (4, 100, 32), (1, 1, 64), (2, 500, 32)])
def test_largest_steps_are_within_what_a_scheduler_plans(num_slots: int, tokens: int, max_len: int) -> None:
    spec = embedded_spec(TREE)
    worker = dataclasses.replace(
        spec.worker,
        model=dataclasses.replace(spec.worker.model, max_model_len=max_len),
        cache=CacheConfig(page_size=4, num_pages=40),
        scheduler=SchedulerConfig(max_running=num_slots, max_step_tokens=tokens),
    )
    layout = plan_engine(dataclasses.replace(spec, worker=worker)).layout
    steps = largest_steps(layout)
    entered: set[int] = set()
    for kind, plan in steps:
        rounds = unpack_i32(plan.slots).tolist()
        assert set(rounds) <= entered, "a round of a slot that no prompt has entered"
        slots = rounds + [chunk.slot for chunk in plan.chunks]
        assert len(set(slots)) == len(slots) <= num_slots
        assert _num_tokens(plan) <= max(tokens, len(plan.chunks))
        assert all(c.start >= 0 and c.start + len(unpack_i32(c.tokens)) < max_len for c in plan.chunks)
        assert kind != "rounds" or len(rounds) == num_slots
        entered |= set(slots)
    assert entered == set(range(num_slots))
    assert max(_num_tokens(plan) for _, plan in steps) == min(tokens, num_slots * (max_len - 2)) or tokens < num_slots


@pytest.mark.parametrize("experts", [False, True])
def test_experts_have_adapters_in_the_largest_steps(experts: bool) -> None:
    """A pass with them uses more memory."""
    layout = plan_engine(embedded_spec(TREE)).layout
    steps = largest_steps(dataclasses.replace(layout, lora=LoraConfig(experts=experts)))
    adapters = [init.adapter for _, plan in steps for init in plan.inits]
    assert adapters and set(adapters) == {0 if experts else -1}


def test_latent_rows_are_expanded_in_the_largest_steps(tmp_path: Path) -> None:
    """As many of them as ever are."""
    write_config(tmp_path, "dsv3-tiny")
    source = ModelSource(str(tmp_path / "target"), load_format="dummy", max_model_len=4096)
    worker = WorkerConfig(source, CacheConfig(16, num_pages=40), SchedulerConfig(max_running=4, max_step_tokens=256))
    expanded = []
    for _, plan in largest_steps(plan_engine(EngineSpec(worker)).layout):
        counts = tuple(len(unpack_i32(chunk.tokens)) for chunk in plan.chunks)
        lists = ChunkLists(tuple(chunk.start for chunk in plan.chunks), counts)
        if pays(lists):
            expanded.append(sum(lists.starts) + sum(counts))
    assert max(expanded) == MAX_TOKENS * 256


def _num_tokens(plan: StepPlan) -> int:
    return sum(len(unpack_i32(chunk.tokens)) for chunk in plan.chunks)


def _host(folder: Path, groups: str) -> HostMemory:
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "meminfo").write_text("MemTotal:  64000000 kB\nMemFree: 1 kB\nMemAvailable: 32000000 kB\n")
    (folder / "proc" / "self" / "cgroup").write_text(groups)
    return HostMemory(folder / "proc", folder / "cgroup")


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    """Version 2, the limit at a parent; version 1, whose root is the container's own group and whose path is not."""
    parent = tmp_path / "two" / "cgroup" / "pod"
    (parent / "box").mkdir(parents=True)
    (parent / "memory.max").write_text("8000000000\n")
    (parent / "memory.current").write_text("5000000000\n")
    (parent / "memory.stat").write_text("anon 1\ninactive_file 2000000000\n")
    (parent / "box" / "memory.max").write_text("max\n")
    host = _host(tmp_path / "two", "0::/pod/box\n")
    assert (host.total(), host.free()) == (8 * GB, 5 * GB)
    own = tmp_path / "one" / "cgroup" / "memory"
    own.mkdir(parents=True)
    (own / "memory.limit_in_bytes").write_text("4000000000\n")
    (own / "memory.usage_in_bytes").write_text("1000000000\n")
    host = _host(tmp_path / "one", "5:cpu:/\n4:memory:/docker/abc\n0::/\n")
    assert (host.total(), host.free()) == (4 * GB, 3 * GB)


def test_without_limits_the_machine_counts(tmp_path: Path) -> None:
    root = tmp_path / "cgroup" / "memory"
    root.mkdir(parents=True)
    (root / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    host = _host(tmp_path, "4:memory:/\n0::/\n")
    assert (host.total(), host.free()) == (64_000_000 * 1024, 32_000_000 * 1024)


def test_the_peak_of_a_piece_of_work_is_seen() -> None:
    """The work maps new pages, because torch's allocator may reuse memory of earlier tests."""

    def run() -> None:
        with mmap.mmap(-1, 100_000_000) as pages:
            np.frombuffer(pages, np.uint8)[:] = 1

    memory = HostMemory()
    gc.collect()
    peak = max(memory.peak_of(run) for _ in range(3))  # other memory may go meanwhile
    assert 90 * 10**6 < peak < 250 * 10**6
