"""The section `learning` of the configuration."""

from dataclasses import dataclass
from typing import Annotated, Literal

from aerie.attention.setting import Setting, check_settings


@dataclass(frozen=True)
class LearningConfig:
    """A draft that learns from the texts that its engine writes (docs/learning-draft.md). Off without this section.

    device: where it is trained.
    priority: when it is trained. `idle`: with the lowest scheduling priority (SCHED_IDLE); `engine_idle`: so, and only
        while the engine has no request; `normal`: with the usual priority.
    threads: torch threads of the training.
    memory_tokens: maximum tokens of the texts, which are kept in memory only; newer texts replace older ones.
    key_share: maximum share of these tokens from one API key, if several keys are used.
    held_out: share of the texts that are never trained on; candidates are measured on them.
    min_texts: new texts between two candidates, and texts held out before the first.
    recent_texts: number of newest texts. A candidate is trained on them and on as many older ones, and must be better
        on the held-out ones among the newest.
    max_length: maximum tokens of a text; the rest is cut off.
    steps: training steps of a candidate.
    batch_tokens: tokens per training step.
    learning_rate: maximum learning rate of AdamW.
    min_gain: a candidate is published only if its acceptance length on recent texts is better by this share, with 95 %
        confidence.
    max_loss: a candidate is not published if its acceptance length on older texts is worse by more than this share,
        with 95 % confidence.
    canary_rounds: with several engines, rounds that a draft serves on the engine that trains before others get it.
    versions: number of published versions that can be restored.
    folder: where the weights of versions are written; "": the engine's folder of sockets, which is removed with it.
        Clusters of several nodes need a folder that all nodes share.
    """

    device: Literal["cpu"] = "cpu"
    priority: Literal["idle", "engine_idle", "normal"] = "idle"
    threads: Annotated[int, Setting(ge=1)] = 1
    memory_tokens: Annotated[int, Setting(ge=1000, le=16_000_000)] = 2_000_000
    key_share: Annotated[float, Setting(gt=0, le=1)] = 0.5
    held_out: Annotated[float, Setting(gt=0, lt=1)] = 0.15
    min_texts: Annotated[int, Setting(ge=1)] = 16
    recent_texts: Annotated[int, Setting(ge=8)] = 128
    max_length: Annotated[int, Setting(ge=64)] = 1024
    steps: Annotated[int, Setting(ge=1)] = 60
    batch_tokens: Annotated[int, Setting(ge=64)] = 1024
    learning_rate: Annotated[float, Setting(gt=0, le=1)] = 3e-4
    min_gain: Annotated[float, Setting(ge=0)] = 0.005
    max_loss: Annotated[float, Setting(ge=0, le=1)] = 0.2
    canary_rounds: Annotated[int, Setting(ge=0)] = 2000
    versions: Annotated[int, Setting(ge=1)] = 5
    folder: str = ""

    def __post_init__(self) -> None:
        check_settings(self)
