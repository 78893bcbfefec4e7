"""`SuffixSpeculation`: an engine that speculates without a draft model. Used by `speculative.build`."""

from collections.abc import Mapping
from dataclasses import dataclass

from attention.metadata import Mode
from speculative.config import SpeculativeConfig
from speculative.decoding import SpeculativeDecoding
from speculative.ops.suffix_match import MatchLimits
from workers.config import RoundShapes
from workers.runner.backends import Backends
from workers.runner.decoding import CuttableStrategy
from workers.runner.layout import EngineParts, PhaseDone, WithoutDraftModel


@dataclass(frozen=True)
class SuffixSpeculation(WithoutDraftModel):
    """`workers.runner.layout.Speculation` of `method: suffix`: it has no weights and no KV, and reads no layer of the
    target."""

    config: SpeculativeConfig
    captured_layers: tuple[int, ...] = ()
    lookahead: int = 0

    @property
    def shapes(self) -> RoundShapes:
        return self.config.shapes

    @property
    def verified_modes(self) -> Mapping[Mode, bool]:
        return {Mode.VERIFY: False}

    @property
    def has_synthetic_acceptance(self) -> bool:
        return self.config.synthetic_acceptance_length is not None

    def strategy(self, parts: EngineParts, backends: Backends, done: PhaseDone) -> CuttableStrategy:
        return SpeculativeDecoding(
            parts.layout.shapes,
            parts.target,
            None,
            parts.slots,
            parts.sampler,
            parts.grammars.masks,
            self.config.synthetic_acceptance_length,
            MatchLimits(self.config.match_min, self.config.match_max),
        )
