"""`CapturedForward`: passes of a tower as CUDA graphs, padded to a few sizes. A pass is one graph up to the tower's
first block and one for each block, so that steps of other requests come between, as with `PiecewiseForward`.

Run eagerly, a tower of 32 layers takes the host 31 ms, whatever the image's size; its graphs take 7 for a small one
(H200, `python -m tests.bench images`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aerie.kernels.to_device import pinned
from aerie.workers.device import no_garbage_collection
from aerie.workers.vision.config import CHANNELS
from aerie.workers.vision.encoders import Grid, ImageEncoder

Recording = tuple[list[Callable[[], None]], Tensor]  # replays of a pass's parts in order, and its result
Record = Callable[[Callable[[], Tensor], Iterable[nn.Module]], Recording]


@dataclass(frozen=True)
class _Size:
    """A captured pass. pixels, layout: its inputs."""

    pixels: Tensor
    layout: Mapping[str, Tensor]
    parts: list[Callable[[], None]]
    result: Tensor


@dataclass
class _Pass:
    """A pass of a tower that is replayed part by part.

    num_replayed: parts that have run.
    num_due: parts that the caller has asked for.
    result: once all have run.
    """

    size: _Size
    num_tokens: int
    num_replayed: int = 0
    num_due: int = 1
    result: Tensor | None = None

    def replay(self, end: int) -> None:
        for part in self.size.parts[self.num_replayed : end]:
            part()
        self.num_replayed = max(self.num_replayed, end)
        if self.result is None and end == len(self.size.parts):
            self.result = self.size.result[: self.num_tokens].clone()


class CapturedForward:
    """One pass at a time may be paused. All sizes share memory, so it runs to its end before another one starts."""

    def __init__(
        self,
        encoder: ImageEncoder,
        max_patches: int,
        patch_pixels: int,
        device: torch.device,
        record: Record,
    ) -> None:
        """patch_pixels: of a channel. record: `record_parts`, or a stand-in."""
        self._encoder = encoder
        self._sizes: dict[int, _Size] = {}
        self._paused: _Pass | None = None
        square = 1, 2 * encoder.merge_size, 2 * encoder.merge_size  # of any grid the layout has these shapes
        for size in sorted(encoder.captured_sizes(max_patches), reverse=True):  # the largest allocates
            layout = encoder.padded(square, size)
            if layout is None:
                return
            inputs = {name: tensor.to(device) for name, tensor in layout.items()}
            pixels = torch.zeros((size, CHANNELS, patch_pixels), device=device)
            self._sizes[size] = _Size(pixels, inputs, *record(self._pass_over(pixels, inputs), encoder.blocks))

    def _pass_over(self, pixels: Tensor, inputs: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        return lambda: self._encoder.forward_padded(pixels, inputs)

    def covers(self, num_patches: int) -> bool:
        return any(num_patches <= size for size in self._sizes)

    def run(self, pixels: Tensor, grid: Grid, num_tokens: int) -> Tensor:
        """Run a whole pass. See `ImageEncoder.forward`. num_tokens: of the image."""
        done = self._begun(pixels, grid, num_tokens)
        done.replay(len(done.size.parts))
        assert done.result is not None
        return done.result

    def start(self, pixels: Tensor, grid: Grid, num_tokens: int) -> None:
        """Start a pass that pauses before the first block. A paused pass is abandoned."""
        self.abandon()
        self._paused = self._begun(pixels, grid, num_tokens)
        self._paused.replay(1)

    def advance(self, num_blocks: int) -> Tensor | None:
        """Run `num_blocks` blocks of the paused pass; to the end if 0. Return the result; None if it has not ended."""
        paused = self._paused
        assert paused is not None, "started"
        num_parts = len(paused.size.parts)
        paused.num_due = min(paused.num_due + (num_blocks or num_parts), num_parts)
        paused.replay(paused.num_due)
        if paused.num_due < num_parts:
            return None
        self._paused = None
        return paused.result

    def abandon(self) -> None:
        self._paused = None

    def _begun(self, pixels: Tensor, grid: Grid, num_tokens: int) -> _Pass:
        """Finish the paused pass, and copy the inputs of the next one to the smallest captured size that fits."""
        if self._paused is not None:
            self._paused.replay(len(self._paused.size.parts))
        number = min(size for size in self._sizes if size >= len(pixels))
        size, layout = self._sizes[number], self._encoder.padded(grid, number)
        assert layout is not None
        size.pixels[: len(pixels)].copy_(pixels)
        size.pixels[len(pixels) :].zero_()
        for name, tensor in layout.items():
            size.layout[name].copy_(pinned(tensor, pixels.device), non_blocking=True)
        return _Pass(size, num_tokens)


class _Cuts:
    """Ends a graph and begins the next one."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def begin(self) -> None:
        self.graphs.append(torch.cuda.CUDAGraph())
        self.graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        self.graphs[-1].capture_end()

    def cut(self, *_: object) -> None:
        self.end()
        self.begin()


def record_parts(pool: Any) -> Record:
    """Return a function that records passes as CUDA graphs whose memory is in `pool`. One cut is before each block."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(forward: Callable[[], Tensor], blocks: Iterable[nn.Module]) -> Recording:
        with torch.inference_mode(), torch.cuda.stream(stream), no_garbage_collection():
            forward()  # loads kernels, and creates the workspaces of this stream
            torch.cuda.synchronize()
            cuts = _Cuts(pool)
            hooks = [block.register_forward_pre_hook(cuts.cut) for block in blocks]
            cuts.begin()
            try:
                result = forward()
            finally:
                cuts.end()
                for hook in hooks:
                    hook.remove()
        torch.cuda.synchronize()
        return [graph.replay for graph in cuts.graphs], result

    return record
