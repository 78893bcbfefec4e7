"""Configuration of one engine replica: model, ranks, scheduler. Validated by `aerie.cluster.config`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from aerie.attention.config import CacheConfig, TargetAttention
from aerie.attention.setting import Setting, check_settings

LoadFormat = Literal["safetensors", "dummy"]
Implementation = Literal["auto", "transformers"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Images = Literal["auto", "off"]
Auto = Literal["auto"]

# by type of device: on a GPU the largest captured step (`aerie.workers.runner.graphs.graph_keys.TOKEN_BUCKETS`), which
# saturates matrix products and takes 0.25 GB of activations
MAX_STEP_TOKENS = {"cuda": 2048, "cpu": 512}
# by type of device: range of slots for `max_running: auto`; more cost captures and tables, and gain little
AUTO_SLOTS = {"cuda": (8, 256), "cpu": (8, 32)}


@dataclass(frozen=True)
class ModelSource:
    """Source of the target's weights.

    path: folder of the target, under the same path on every node, or a name on the hub: `OWNER/NAME` or
        `OWNER/NAME@REVISION`.
    load_format: `dummy`: random weights, for benchmarks; needs only config.json.
    dtype: `float32`, `bfloat16` or `float16`; auto: the checkpoint's on a GPU, float32 on a CPU.
    device: `cpu` or `cuda`; auto: GPUs if the cluster has any.
    max_model_len: tokens of prompt and answer together; none: the model's own limit.
    seed: seed of dummy weights.
    implementation: `transformers`: always serve through the adapter; auto: use Aerie's own class if there is one, which
        is faster.
    rope_scaling: settings of RoPE in place of config.json's, for longer contexts: `{rope_type: yarn, factor: 4.0,
        original_max_position_embeddings: 32768}`; none: config.json's.
    images: `off`: do not load the vision tower, and refuse images; auto: take them if the checkpoint has a tower of a
        supported family.
    max_image_pixels: larger images are reduced to this number of pixels; a token has 28 x 28 of them in Qwen2.5-VL, and
        32 x 32 in Qwen3-VL and Qwen3.5.
    """

    path: str = ""
    load_format: LoadFormat = "safetensors"
    dtype: DType = "auto"
    device: Device = "auto"
    max_model_len: int | None = None
    seed: Annotated[
        int,
        Setting("--seed --random-seed", note="of dummy weights; a request's tokens follow from its own `seed`"),
    ] = 0
    implementation: Annotated[Implementation, Setting("--model-impl")] = "auto"
    rope_scaling: Annotated[Mapping[str, Any] | None, Setting("--rope-scaling")] = None
    images: Images = "auto"
    max_image_pixels: Annotated[int, Setting(ge=2**14)] = 2**22

    @property
    def folder(self) -> Path:
        """`path` of a model on this node."""
        return Path(self.path)


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of running and queued requests, and of a step.

    max_running: requests that decode together (slots); auto: as many as fit in KV at 2,048 tokens each: a power of two,
        8 to 256 on GPUs, 8 to 32 on CPUs.
    max_step_tokens: limit of prompt tokens per step; auto: 2048 on a GPU, 512 on a CPU. Larger steps run eagerly and
        delay other requests, but may be faster for long prompts of a mixture of experts.
    max_waiting: limit of queued requests, more get 429; none: only `max_waiting_bytes` counts.
    itl_target_ms: maximum inter-token latency in milliseconds to which prompt chunks may extend a step; auto: derived
        from measured step times, tripled under a backlog. A number is a fixed limit; beyond it the batch grows slowly.
    max_waiting_bytes: host memory of queued requests, more get 429: 3 KB each and 4 bytes per prompt token; the default
        holds 15,000 requests of 3,500 tokens.
    """

    max_running: Annotated[int | Auto, Setting("--max-num-seqs --max-running-requests", ge=1)] = "auto"
    max_step_tokens: Annotated[int | Auto, Setting(ge=1)] = "auto"
    max_waiting: Annotated[int | None, Setting("--max-num-queued-reqs --max-queued-requests", ge=1)] = None
    itl_target_ms: Annotated[float | Auto, Setting(gt=0)] = "auto"
    max_waiting_bytes: Annotated[int, Setting(ge=1)] = 256 * 2**20

    def __post_init__(self) -> None:
        check_settings(self)

    def resolved(self, device_type: str) -> "SchedulerConfig":
        """Return the configuration with a number for `max_step_tokens`. device_type: "cpu" or "cuda"."""
        if self.max_step_tokens != "auto":
            return self
        return replace(self, max_step_tokens=MAX_STEP_TOKENS[device_type])

    @property
    def step_token_limit(self) -> int:
        """`max_step_tokens` of a `resolved` configuration."""
        assert self.max_step_tokens != "auto", "only `EngineLayout.scheduler` knows what auto stands for"
        return self.max_step_tokens

    def with_slots(self, num_slots: int) -> "SchedulerConfig":
        """Return the configuration with a number for `max_running`, which is decided while a rank is built."""
        return replace(self, max_running=num_slots)

    @property
    def num_slots(self) -> int:
        """`max_running` of the configuration that a rank was built with."""
        assert self.max_running != "auto", "only the layout of a rank that is built knows what auto stands for"
        return self.max_running


@dataclass(frozen=True)
class RoundShape:
    """Sizes of a draft tree of one shape, per request.

    The scheduler reserves KV pages by these numbers alone.

    width: rows verified, and KV positions after the committed length that they write (1: no speculation).
    max_new_tokens: maximum tokens that verifying it can emit, at most `width`.
    draft_tokens: KV positions after the committed length that drafting writes (0: no draft).
    """

    name: str
    width: int
    max_new_tokens: int
    draft_tokens: int

    def __post_init__(self) -> None:
        assert 1 <= self.max_new_tokens <= self.width, f"{self.name}: a round emits at most what it verifies"

    @property
    def depth(self) -> int:
        """Draft tokens that a round can accept."""
        return self.max_new_tokens - 1

    @property
    def is_chain(self) -> bool:
        """Whether it has drafts and they form a chain, so that all can be accepted."""
        return 1 < self.width == self.max_new_tokens

    @property
    def max_kv_tokens(self) -> int:
        """KV positions after the committed length that a round of this shape may write."""
        return max(self.width, self.max_new_tokens + self.draft_tokens)


FEW_REQUESTS = 8  # batch size up to which only the default tree shape is used beside prompt chunks
PLAIN = RoundShape(name="plain", width=1, max_new_tokens=1, draft_tokens=0)


@dataclass(frozen=True)
class RoundShapes:
    """The tree shapes that an engine can run; a plan names them by index. shapes[0] is non-speculative decoding.

    default: index of the shape for requests with speculation; 0 without a draft.
    adaptive: whether the scheduler chooses a shape for each step (`aerie.workers.scheduling.shapes`); else the default
        is used.
    eager: whether no step is captured, so that a shape needs no graph.
    keeps_tokens: whether ranks hold the tokens of running requests, because drafts are copied from them.
    model_free: whether no model drafts. Then drafts cost nothing: every round, even a non-speculative one, drafts at
        the default depth. A text without a match has no draft.
    drafted_by: the draft's method, for metrics.
    """

    shapes: tuple[RoundShape, ...] = (PLAIN,)
    default: int = 0
    adaptive: bool = False
    eager: bool = False
    keeps_tokens: bool = False
    model_free: bool = False
    drafted_by: str = "model"

    def __post_init__(self) -> None:
        assert self.shapes[0] == PLAIN and 0 <= self.default < len(self.shapes)

    def __getitem__(self, index: int) -> RoundShape:
        return self.shapes[index]

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def learns_acceptance(self) -> bool:
        """Whether shapes are chosen by observed acceptance."""
        return self.adaptive and not self.model_free

    @property
    def verifies_last_drafts(self) -> bool:
        """Whether a step may verify the shape that the previous step drafted, and draft another."""
        return self.eager and self.learns_acceptance

    def wider(self, one: int, other: int) -> int:
        """Return the index of the shape with more nodes."""
        return max(one, other, key=lambda index: self[index].width)

    @property
    def max_new_tokens(self) -> int:
        """Maximum tokens that a round of any shape can emit."""
        return max(shape.max_new_tokens for shape in self.shapes)

    @property
    def max_kv_tokens(self) -> int:
        """Maximum KV positions after the committed length that a round of any shape may write."""
        return max(*(s.width for s in self.shapes), self.max_new_tokens + max(s.draft_tokens for s in self.shapes))

    @property
    def max_ahead_tokens(self) -> int:
        """Maximum KV positions after the committed length known to the host that two rounds in flight and a third may
        write."""
        return 2 * self.max_new_tokens + self.max_kv_tokens

    @property
    def max_kv_tokens_at_end(self) -> int:
        """Maximum KV positions that a round may write after a request's last token: drafts beyond it are never
        committed."""
        return max(max(shape.width, shape.draft_tokens) for shape in self.shapes)

    @property
    def unrestricted(self) -> tuple[int, ...]:
        """Indices of the shapes that are captured for every kind of step: non-speculative decoding and the default."""
        return (0, self.default) if self.default else (0,)

    def mixed_shapes(self, num_requests: int, rare_sampling: bool = False) -> tuple[int, ...]:
        """Return the indices of the shapes for rounds of `num_requests` in mixed batches, ascending.

        Up to `FEW_REQUESTS` requests: only the default, because its rows are few compared with a chunk's. With more
        requests: non-speculative decoding and the widest chain, because the other rows of a tree cost more than they
        gain.

        rare_sampling: whether the step has sampling options for which only `unrestricted` shapes are captured.
        """
        if not self.adaptive or num_requests <= FEW_REQUESTS:
            return (self.default,)
        chains = [index for index, shape in enumerate(self.shapes) if shape.is_chain]
        return self.unrestricted if rare_sampling or not chains else (0, chains[-1])

    def largest_mixed_shape(self, num_requests: int) -> int:
        """Return the shape of `mixed_shapes` with which mixed batches are measured and planned."""
        return self.mixed_shapes(num_requests)[-1]

    @property
    def num_draft_tokens(self) -> int:
        """Tokens drafted per round of the default shape."""
        return self.shapes[self.default].width - 1


@dataclass(frozen=True)
class GraphCapture:
    """Capture of steps as CUDA graphs, on each rank.

    limit_s: seconds that a start may spend on graphs after the first ones.
    limit_gb: device memory in GB (10^9 bytes) for graphs of other rounds than greedy and purely random ones; at most a
        twentieth of the free memory at the start, and beyond 2 GB a tenth of what weights leave and 30 MB for
        each of `SchedulerConfig.max_running`. All graphs of Llama-2-70B with a chain and 192 requests on two H200 take
        4.7. Without them, steps are padded: with 2 GB, first tokens there took 1.3 times as long under load.
    busy_interval_s: shortest time between captures while requests run; 0 captures before every step until all graphs
        exist.
    """

    limit_s: Annotated[float, Setting(ge=0)] = 0.0
    limit_gb: Annotated[float, Setting(ge=0)] = 6.0
    busy_interval_s: Annotated[float, Setting(ge=0)] = 1.0

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class LoraConfig:
    """LoRA adapters of the target, chosen by request (docs/lora.md).

    modules: adapters that are loaded at the start: names for clients, each with a folder that has the same path on
        every node, or a name on the hub; others may be loaded later.
    max_loras: adapters that one step may use; each takes device memory for `max_lora_rank`, used or not.
    max_lora_rank: largest rank of any adapter; rounded up to a multiple of 16.
    max_cpu_loras: adapters that may be loaded at a time, in host memory; none: no limit.
    experts: whether adapters may change routed experts, whose tables are large.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    max_loras: Annotated[int, Setting("--max-loras --max-loras-per-batch", ge=1)] = 4
    max_lora_rank: Annotated[int, Setting("--max-lora-rank", ge=1, le=512)] = 16
    max_cpu_loras: Annotated[int | None, Setting("--max-cpu-loras --max-loaded-loras", ge=1)] = None
    experts: Annotated[bool, Setting("--lora-experts")] = False

    def __post_init__(self) -> None:
        check_settings(self)
        limit = self.max_cpu_loras
        if limit is not None and limit < max(self.max_loras, len(self.modules)):
            raise ValueError(
                f"max_cpu_loras={limit}: must be at least max_loras={self.max_loras}, and at least the "
                f"{len(self.modules)} modules"
            )


@dataclass(frozen=True)
class WorkerConfig:
    """One engine replica, without its decoding strategy.

    expert_parallel: each rank has some whole experts, instead of a slice of each.
    cuda_graphs: capture rounds on a GPU; false only for measurements.
    graph_capture: time and memory for capturing rarer kinds of rounds.
    deterministic: on a GPU, an answer depends only on its request (see `aerie.workers.runner.deterministic`).
    measure_costs: measure step times at the start; without it the scheduler has no `CostTable`.
    debug: assert that all ranks agree after every step, and the contract at every call of an operation.
    lora: None: no adapters.
    """

    model: ModelSource
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    attention: TargetAttention = field(default_factory=TargetAttention)
    tensor_parallel: int = 1
    expert_parallel: bool = False
    cuda_graphs: bool = True
    graph_capture: GraphCapture = field(default_factory=GraphCapture)
    deterministic: bool = False
    measure_costs: bool = True
    debug: bool = False
    lora: LoraConfig | None = None
