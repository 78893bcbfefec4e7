"""Chooses a model's attention backend per mode, and decides whether CUDA graphs are possible with them. Used by
`aerie.workers.runner.build` and `aerie.speculative.build`. `aerie.attention.limits` says what backends support."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from aerie.attention import registry
from aerie.attention.backend import AttentionBackend
from aerie.attention.config import TargetAttention
from aerie.attention.kv_cache.layout import HeadsLayout, LatentLayout
from aerie.attention.limits import AttentionUse
from aerie.attention.registry import Choice, choose_backends
from aerie.kernels.capability import Capability
from aerie.kernels.kv.batches import Mode
from aerie.workers.models.config import ModelConfig

Backends = dict[Mode, AttentionBackend]


@dataclass(frozen=True)
class ModelShape:
    """The properties of a model on one rank that matter to attention. kv_dtype: dtype of its KV; None: `dtype`."""

    config: ModelConfig
    tensor_parallel: int
    dtype: torch.dtype
    page_size: int
    device: Capability
    kv_dtype: torch.dtype | None = None

    def use(self, mode: Mode, tree: bool = False, window: int | None = None) -> AttentionUse:
        """Return what a backend must support. tree: whether masks branch in this mode. window: see `AttentionUse`."""
        groups = self.config.kv_groups(self.tensor_parallel, self.kv_dtype or self.dtype)
        layouts = [group.layout for group in groups]
        rules = (self.config.score_rule(layer) for group in groups for layer in group.layers)
        layout = layouts[0]
        assert {other.kind for other in layouts} == {layout.kind}, "a mode has one backend, which reads one KV layout"
        sizes = [other.head_dim for other in layouts if isinstance(other, HeadsLayout)]
        return AttentionUse(
            mode=mode,
            num_heads=self.config.num_heads // self.tensor_parallel,
            num_kv_heads=self.config.num_kv_heads_per_rank(self.tensor_parallel),
            head_dim=self.config.head_dim,
            page_size=self.page_size,
            dtype=self.dtype,
            device=self.device,
            tree=tree,
            layout=layout.kind,
            value_dim=layout.latent if isinstance(layout, LatentLayout) else None,
            window=window,
            kv_dtype=self.kv_dtype,
            scores=tuple(dict.fromkeys(rules)),
            head_dims=tuple(sizes) if len(sizes) > 1 else (),
        )


def target_choices(names: TargetAttention, shape: ModelShape, verified: Mapping[Mode, bool]) -> list[Choice]:
    """Return the configured backends of the target. Verification uses the backend of decode. verified:
    `aerie.workers.runner.layout.Speculation.verified_modes`."""
    choices = [
        Choice("attention.prefill", names.prefill, shape.use(Mode.PREFILL)),
        Choice("attention.decode", names.decode, shape.use(Mode.DECODE)),
    ]
    return choices + [
        Choice("attention.decode", names.decode, shape.use(mode, tree)) for mode, tree in verified.items()
    ]


def target_backends(
    names: TargetAttention,
    shape: ModelShape,
    verified: Mapping[Mode, bool],
    override: AttentionBackend | None = None,
) -> Backends:
    """Return the backends of `target_choices`. Raises ValueError as `choose_backends` does.

    override: a backend to use in all modes, of the same name as the chosen ones.
    """
    chosen = choose_backends(target_choices(names, shape, verified))
    if override is None:
        return chosen
    assert {backend.name for backend in chosen.values()} == {override.name}, "`refusal` excludes other backends"
    return dict.fromkeys(chosen, override)


def cpu_length_readers(*models: Mapping[Mode, AttentionBackend]) -> str | None:
    """Return the names of backends of rounds that read lengths on the host, for the log. None without such backends:
    then rounds can be CUDA graphs, and no lengths are copied to the host."""
    readers = {
        f"{backend.name} in {mode.value}"
        for model in models
        for mode, backend in model.items()
        if mode is not Mode.PREFILL and registry.needs_cpu_seq_lens(backend.name, mode)
    }
    return ", ".join(sorted(readers)) or None


def chunks_on_device(*models: Mapping[Mode, AttentionBackend]) -> bool:
    """Return whether steps with prompt chunks can be CUDA graphs, because no backend needs the chunks on the host."""
    prefill = [model[Mode.PREFILL] for model in models if Mode.PREFILL in model]
    return all(registry.BACKENDS[backend.name].chunks_on_device for backend in prefill)
