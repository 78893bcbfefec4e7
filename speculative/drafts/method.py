"""The interface of draft methods: two classes. Verification, acceptance, commit and tree growth are the same for all
methods.

`DraftMethod` describes a checkpoint: a plain value, read before weights are loaded.
`DraftModel` is the module that drafts on one rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from aerie.speculative.drafts.recognition import method_of
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.forward_context import ForwardContext
from aerie.workers.layers.vocab import LMHead, VocabEmbedding
from aerie.workers.models.config import ModelConfig
from aerie.workers.models.decoder import DecoderOutput
from aerie.workers.models.name_map import NameMap


@dataclass(frozen=True)
class DraftMethod(ABC):
    """A draft checkpoint of this method: its config.json, checked against its target.

    name: value of `speculative.method`.
    lookahead: number of later tokens that the KV of a position depends on: 1 if a row reads the next token's embedding.
    path: folder of its weights.
    model: configuration of its layers, for its KV pool and attention backends.
    vocab_size: size of its own vocabulary, or of the target's if it has none.
    capture: layers of the target whose input it reads; empty: it reads the final hidden state.
    shared_modules: which of "embed_tokens" and "lm_head" are always the target's.
    reads_target_kv: whether its layers attend to the target's KV and have no KV themselves. `model` then has the
        target's K/V heads (`aerie.speculative.drafts.drafter.TargetKVRunner`).
    takes_adapters: whether LoRA adapters may change it beside its target (docs/lora.md).
    trims_head: whether it can use a part of the target's vocabulary head (`aerie.speculative.drafts.trimmed_head`).
    head_rows: number of rows in that part, which is also its `vocab_size`; None: the whole head.
    """

    name: ClassVar[str]
    lookahead: ClassVar[int] = 1
    shared_modules: ClassVar[tuple[str, ...]] = ()
    reads_target_kv: ClassVar[bool] = False
    takes_adapters: ClassVar[bool] = False
    trims_head: ClassVar[bool] = False

    path: str
    model: ModelConfig
    vocab_size: int
    capture: tuple[int, ...]
    head_rows: int | None = field(default=None, kw_only=True)

    def trimmed(self, rows: int | None) -> Self:
        """Return the draft with `rows` rows of the target's vocabulary head. Returns it unchanged for None, or if it
        has a head of its own."""
        return replace(self, vocab_size=rows, head_rows=rows) if rows is not None and self.trims_head else self

    @classmethod
    def folder(cls, draft_path: str, target_path: str) -> str:
        """Return the folder of the draft's checkpoint, from the configured paths."""
        return draft_path

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        """Whether a checkpoint with this config.json is a draft of this class. Raises ValueError like `method_of`."""
        return method_of(raw) == cls.name

    @classmethod
    @abstractmethod
    def read(cls, path: str, raw: Mapping[str, Any], target: ModelConfig) -> Self:
        """Read config.json, `raw`, of folder `path`. Raises ValueError, naming draft, target and remedy, if they do not
        fit, or for an unsupported setting."""

    @abstractmethod
    def build(self, group: TPGroup, max_position: int, device: torch.device) -> "DraftModel":
        """Build the model without weights.

        max_position: exclusive bound on positions.
        device: for computed tensors, such as the RoPE table.
        """

    @property
    def embedding_size(self) -> int:
        """Width of its embedding."""
        return self.model.hidden_size

    @property
    def max_num_steps(self) -> int | None:
        """Number of tokens that one pass drafts; None for a method that drafts one token per pass."""
        return None

    @property
    def masks_steps(self) -> bool:
        """Return whether draft steps need masks even in a chain, because rows see later rows."""
        return False

    @property
    def window(self) -> int | None:
        """The longest window of a layer, as in `DecodeBatch`; None if all layers see all tokens."""
        return None

    @property
    @abstractmethod
    def weight_names(self) -> NameMap:
        """Map checkpoint names to parameters. A draft inside its target's checkpoint ignores the target's tensors."""


class DraftModel(nn.Module, ABC):
    """A draft on one rank.

    Row i of a pass has position i, reads the feature of position i and the embedding of token i + 1, and predicts token
    i + 2.

    group: its ranks.
    num_layers: number of its layers. All but the last compute every row of `extend`.
    reads_target_kv: see `DraftMethod`.
    embed_tokens: embedding of the target's vocabulary; the target's module if the checkpoint has none (`loading`).
    lm_head: vocabulary head of the draft's vocabulary; the target's module if the checkpoint has none.
    target_ids: [draft vocabulary] int64 target id of each draft id; None if equal.
    from_target: paths of its modules whose weights come from the target's checkpoint, not from its own.
    copied: those that are copies of the target's, because the target's are sharded otherwise.
    reads_last_layer: whether its features are the target's final hidden states. The target then computes these for
        every row.
    drafts_blocks: whether one pass drafts all tokens (`aerie.speculative.drafts.blocks`). Its KV is then extended by
    `keep`.
    """

    reads_last_layer: bool = False
    drafts_blocks: ClassVar[bool] = False
    embed_tokens: VocabEmbedding
    lm_head: LMHead
    target_ids: Tensor | None
    from_target: frozenset[str] = frozenset()
    copied: tuple[str, ...] = ()

    def __init__(self, method: DraftMethod, group: TPGroup) -> None:
        super().__init__()
        model = method.model
        self.group = group
        self.num_layers = model.num_layers
        self.reads_target_kv = method.reads_target_kv
        self.embed_tokens = VocabEmbedding(model.vocab_size, method.embedding_size, group)
        self.lm_head = LMHead(method.vocab_size, model.hidden_size, group)
        self.target_ids = None

    def features(self, output: DecoderOutput) -> Tensor:
        """Return [rows, F]: the part of the target's output that it reads, captured layers or else the final hidden
        states."""
        return output.hidden if output.captured is None else output.captured

    def extend(self, ids: Tensor, features: Tensor, context: ForwardContext) -> Tensor:
        """Extend its KV to the committed tokens. Return the recurrent state [n, hidden] of the rows that attend.

        ids: [rows] int64 next tokens.
        features: [rows, F] of the target.
        """
        return self.step(ids, features, context)

    @abstractmethod
    def keep(self, ids: Tensor, features: Tensor, context: ForwardContext) -> None:
        """Extend its KV to the committed tokens without drafting next, so that no row attends in the last layer."""

    @abstractmethod
    def step(self, ids: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Run one draft step. Return the recurrent state [n, hidden] of the rows that attend in the last layer.

        ids: [rows] int64 drafted tokens, target ids.
        hidden: [rows, hidden] states that they were drafted from; may change in place.
        context: context of these rows. The rows that attend are `attending` of its last layer's context, in that order;
            all rows (n = rows) if that is None.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [rows, shard size] logits over the draft's vocabulary, of recurrent states [rows, hidden]."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def to_target(self, ids: Tensor) -> Tensor:
        """Map draft ids of any shape to target ids."""
        return ids if self.target_ids is None else self.target_ids[ids]
