"""Attention launched early, many times, with other lengths each time and every value checked on the device:
`python -m tests.kernels.pdl_stress --launches 1000000`.

A pass takes the next row of a list of lengths, poisons the KV that it is about to store, plans, and runs layers as
production does: norm, store, attention, all launched early, with nothing in between that would hide a race. What
attention should give is known beforehand for every length, and the largest difference stays on the device until the
end. A CUDA graph holds several passes and is replayed; where a plan, a length or the store were read too early, a
launch would see those of the replay before. Half of the passes plan in `forward`, as callers without a context do.

Hazards within a program, which values do not show: `compute-sanitizer --tool racecheck python -m
tests.kernels.pdl_stress --launches 200`.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from aerie.attention.backends.triton_backend import TritonBackend
from aerie.attention.kv_cache.layout import HeadsLayout
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.capability import Capability
from aerie.kernels.kv.batches import DecodeBatch, Mode, causal_mask
from aerie.kernels.norm.norm_triton import rms_norm
from aerie.kernels.rope.rope_store import Angles
from aerie.kernels.rope.rope_store_triton import rope_store
from tests.support.kernels.attention_cases import uniform_pool, write_tokens

GROUP, KV_HEADS, HEAD_DIM, PAGE = 4, 2, 64, 16
SCALE = HEAD_DIM**-0.5
LAYERS = 2
NUM_LENGTHS = 61  # no divisor of the passes of a graph, so that a place in the graph sees all of them
PASSES = 8  # of a graph
TOLERANCE = 2.0**-7  # relative, of a row and head: weights and results rounded to bfloat16, twice half a unit each


class Stress:
    """num_requests requests of which each row of `lengths` [NUM_LENGTHS, num_requests] int32 is one pass.

    Keys are such that scores hang on the position, and values are random, so that no two lengths give the same.
    turn: [1] int64, the pass. worst: [] float32, the largest relative error so far; not a number if any result was.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, num_requests: int = 4, max_length: int = 1500) -> None:
        generator = torch.Generator().manual_seed(0)
        pages = -(-max_length // PAGE)
        self.batch_size, self.device = num_requests, device
        layout = HeadsLayout(KV_HEADS, HEAD_DIM, dtype)
        self.kv = uniform_pool(1, num_requests * pages, PAGE, layout, device).layer(0)
        order = torch.randperm(num_requests * pages, generator=generator) + 1
        self.table = order.view(num_requests, pages).int().to(device)
        self.lengths = torch.randint(0, max_length, (NUM_LENGTHS, num_requests), generator=generator).int().to(device)
        shape = (2, num_requests, max_length, KV_HEADS, HEAD_DIM)
        self.keys, self.values = torch.randn(shape, generator=generator).to(dtype).to(device).unbind(0)
        hidden = torch.randn((num_requests, GROUP * KV_HEADS * HEAD_DIM), generator=generator)
        self.hidden = hidden.to(dtype).to(device)
        self.weight = torch.ones_like(self.hidden[0])
        position = torch.arange(max_length, device=device).expand(num_requests, -1)
        slots = self.table.gather(1, position // PAGE).long() * PAGE + position % PAGE
        self.slots = slots  # of every position
        write_tokens(self.kv, slots.flatten(), self.keys.flatten(0, 1), self.values.flatten(0, 1))
        self.expected = self._expected(self._rows())
        cos, sin = (torch.full((1, HEAD_DIM // 2), x, device=device) for x in (1.0, 0.0))  # turns nothing
        self.angles = Angles(cos, sin, torch.zeros(num_requests, dtype=torch.int64, device=device))
        self.request = torch.arange(num_requests, device=device)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        self.worst = torch.zeros((), device=device)
        self.backend = TritonBackend()

    def _rows(self) -> Tensor:
        """[B, heads, head_dim] queries, by a kernel that is launched early and triggers before it waits."""
        if self.device.type == "cpu":
            x = self.hidden.float()
            normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).to(self.hidden.dtype)
        else:
            normed = rms_norm(self.hidden, self.weight, 1e-6)
        return normed.view(self.batch_size, GROUP * KV_HEADS, HEAD_DIM)

    def _expected(self, q: Tensor) -> Tensor:
        """[B, max_length, heads, head_dim] float32: what a row gives that writes at each position."""
        keys, values = (x.repeat_interleave(GROUP, 2).double() for x in (self.keys, self.values))
        scores = torch.einsum("bhd,bnhd->bnh", q.double(), keys) * SCALE
        weights = (scores - scores.amax(1, keepdim=True)).exp().unsqueeze(-1)
        return ((weights * values).cumsum(1) / weights.cumsum(1)).float()

    def run_pass(self, plans_before_the_store: bool) -> None:
        length = self.lengths.index_select(0, self.turn % NUM_LENGTHS).squeeze(0)
        self.turn += 1
        own = length.long()
        slots = self.slots[self.request, own]
        k, v = self.keys[self.request, own], self.values[self.request, own]
        mask = causal_mask(self.batch_size, 1, self.device)
        batch = DecodeBatch(Mode.DECODE, 1, 1, length, mask, self.table, self.keys.shape[1])
        expected = self.expected[self.request, own]
        prepared = self.backend.prepare(batch)
        kv = self.kv
        for _ in range(LAYERS):
            poison = torch.full_like(k, float("nan"))
            write_tokens(self.kv, slots, poison, poison)
            q = self._rows()
            if plans_before_the_store:
                prepared.plan(q, kv, ScoreRule(SCALE))
            rope_store(q, k, v, self.angles, kv, slots)
            out = prepared.forward(q, kv, ScoreRule(SCALE))
            error = (out.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
            torch.maximum(self.worst, error.max(), out=self.worst)

    def run_passes(self) -> None:
        for number in range(PASSES):
            self.run_pass(plans_before_the_store=number % 2 == 0)


def repeated(stress: Stress, launches: int) -> Callable[[], None]:
    """Runs passes until attention was launched `launches` times or a few times more: on a GPU as a graph."""
    replays = -(-launches // (LAYERS * PASSES))
    run = stress.run_passes
    if stress.device.type == "cuda":
        stress.run_passes()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stress.run_passes()
        run = graph.replay

    def repeat() -> None:
        for _ in range(replays):
            run()

    return repeat


def worst_error(launches: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> float:
    """The largest relative error of any row and head in `launches` launches; read from the device once, at the end."""
    stress = Stress(device, dtype)
    repeated(stress, launches)()
    return float(stress.worst)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--launches", type=int, default=1_000_000, help="of attention")
    launches = parser.parse_args().launches
    device = torch.device("cuda", 0)
    worst = worst_error(launches, device)
    early = "early" if Capability.of(device).supports_pdl else "normally: this GPU has no early launch"
    print(f"{launches} launches, {early}: largest relative error {worst:.2e}, allowed {TOLERANCE:.2e}")
    if not worst < TOLERANCE:
        raise SystemExit("attention read something before it was written")


if __name__ == "__main__":
    main()
