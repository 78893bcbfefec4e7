"""Calibration texts as tokens, and what a model does with them in this process: second moments of its layers' inputs,
and its loss."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aerie.attention.config import CacheConfig
from aerie.cluster.http.text.chat_template import ChatTemplateError
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.kernels.experts.route import RouterLogits
from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.norm.norm import silu_mul
from aerie.speculative.training.rows import Conversation, read_conversations
from aerie.workers.config import ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.layers.experts_method import ExpertsMethod, ExpertsShape, UnquantizedExperts
from aerie.workers.layers.linear_method import LinearMethod, LinearShape, UnquantizedLinearMethod
from aerie.workers.models.config import ModelConfig
from aerie.workers.models.loading import read_target_config
from aerie.workers.quantization.quant_method import QuantMethod
from aerie.workers.runner.layout import NoSpeculation, plan_engine
from aerie.workers.runner.local_engine import LocalEngine, local_engine
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request, RequestOutput


class Moments:
    """Sums of x x^T over the inputs x of layers, by `Layer.observed`."""

    def __init__(self) -> None:
        self._wanted: Collection[str] = ()
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def begin(self, wanted: Collection[str]) -> None:
        """Discard all moments, then observe these layers."""
        self._wanted, self._sums, self._counts = wanted, {}, {}

    def add(self, layer: str, x: Tensor) -> None:
        """Add inputs x [rows, inputs] of a layer."""
        if layer in self._wanted and x.shape[0]:
            rows = x.float()
            if layer not in self._sums:
                self._sums[layer], self._counts[layer] = rows.new_zeros(rows.shape[1], rows.shape[1]), 0
            self._sums[layer].addmm_(rows.t(), rows)
            self._counts[layer] += rows.shape[0]

    def take(self, layer: str) -> Tensor | None:
        """Return the mean of x x^T, float32 [inputs, inputs]; None if no input was seen."""
        return None if layer not in self._sums else self._sums[layer] / self._counts[layer]


@dataclass(frozen=True)
class Observed(QuantMethod):
    """Keeps every weight in the model's dtype; `moments` records the inputs."""

    moments: Moments = field(default_factory=Moments)

    def linear_method(self, names: Sequence[str], shape: LinearShape) -> LinearMethod:
        return _ObservedLinear(shape, names[0], self.moments)

    def experts_method(self, names: Sequence[str], shape: ExpertsShape) -> ExpertsMethod:
        return _ObservedExperts(shape, names[0], self.moments)


class _ObservedLinear(UnquantizedLinearMethod):
    def __init__(self, shape: LinearShape, name: str, moments: Moments) -> None:
        super().__init__(shape)
        self._name, self._moments = name, moments

    def multiply(self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor), "fp8_inputs is None"
        self._moments.add(self._name, x)
        return super().multiply(x, bias, out)

    def multiply_gated(self, x: Tensor | Fp8Rows, wanted: Fp8Inputs | None = None) -> Tensor | Fp8Rows:
        assert isinstance(x, Tensor), "fp8_inputs is None"
        self._moments.add(self._name, x)
        return super().multiply_gated(x, wanted)


class _ObservedExperts(UnquantizedExperts):
    """The experts' first matrices share the moments of all rows, so that memory does not grow with the number of
    experts."""

    def __init__(self, shape: ExpertsShape, name: str, moments: Moments) -> None:
        super().__init__(shape)
        self._name, self._moments = name, moments

    def multiply(self, x: Tensor | Fp8Rows, router: RouterLogits, out: Tensor | None = None) -> Tensor:
        """Record the inputs of gate and up projections, and per expert those of its down projection; then compute the
        experts."""
        assert isinstance(x, Tensor), "fp8_inputs is None"
        self._moments.add(self._name, x)
        chosen, _ = router.choose()
        for expert in set(chosen.flatten().tolist()):
            rows = x[(chosen == expert).any(1)]
            self._moments.add(f"{self._name}#{expert}", silu_mul(F.linear(rows, self.gate_up[expert])))
        return super().multiply(x, router, out)


def moments_bytes(columns: int) -> int:
    return columns * columns * torch.float32.itemsize


SHIPPED = Path(__file__).parent / "held_out.jsonl"
_CONCURRENCY = 4  # prompts that are run at the same time
_PAGE = 16  # tokens per KV page
_ASKED = SamplingParams(1, 0.0, prompt_logprobs=1)  # makes the last layer compute all rows


def read_texts(folder: Path, sources: Sequence[str], num_rows: int, max_tokens: int) -> list[list[int]]:
    """Return the tokens of the first rows, each cut to `max_tokens`.

    folder: model folder with the tokenizer and chat template.
    sources: see `aerie.speculative.training.rows.read_conversations`.
    Raises TrainingError for rows that cannot be read, ValueError for a tokenizer.
    """
    tokenizer = ChatTokenizer.from_folder(folder)
    texts = [_tokens(tokenizer, row)[:max_tokens] for row in read_conversations(sources)[:num_rows]]
    return [text for text in texts if len(text) > 1]


def _tokens(tokenizer: ChatTokenizer, row: Conversation) -> list[int]:
    """Return the tokens of a conversation in the chat template; of plain text for a model without one."""
    try:
        text = tokenizer.render(row.messages(), add_generation_prompt=False)
    except ChatTemplateError:  # a base model has none
        plain = "\n\n".join(turn.content for turn in row.turns)
        return asyncio.run(tokenizer.encode(plain, add_special_tokens=True))
    return asyncio.run(tokenizer.encode(text, add_special_tokens=False))


@contextlib.contextmanager
def reader(
    folder: Path, max_tokens: int, change: Callable[[ModelConfig], ModelConfig] = lambda config: config
) -> Iterator[LocalEngine]:
    """Run an engine on the CPU that reads texts of up to `max_tokens`. change: changes the model's configuration before
    it is loaded. Raises ValueError if the model cannot be loaded."""
    pages = _CONCURRENCY * (-(-(max_tokens + 1) // _PAGE) + 1) + 1
    cache = CacheConfig(_PAGE, num_pages=pages, dtype="model", prefix_cache=False, state_snapshots=0)
    source = ModelSource(str(folder), device="cpu")
    worker = WorkerConfig(source, cache, SchedulerConfig(_CONCURRENCY, 512), measure_costs=False)
    plan = plan_engine(worker, read_target_config(source, 1), NoSpeculation())
    with local_engine(worker, replace(plan, target=change(plan.target))) as engine:
        yield engine


def mean_loss(engine: LocalEngine, texts: Sequence[Sequence[int]], advance: Callable[[], object]) -> float:
    """Return the mean loss in nats of all tokens after the first of a text. advance: called after each text."""
    total, count = 0.0, 0

    def listen(output: RequestOutput) -> None:
        nonlocal total, count
        if output.prompt_logprobs is not None:
            values = np.frombuffer(output.prompt_logprobs.logprobs, "<f4")
            total, count = total - float(values.sum(dtype=np.float64)), count + len(values)
        if output.finish_reason is not None:
            advance()

    engine.run([Request(f"text-{i}", list(text), _ASKED) for i, text in enumerate(texts)], _CONCURRENCY, listen)
    return total / count
