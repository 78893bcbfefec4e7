"""What a way to draft consists of. The round and the drafter know a draft by these two classes alone; verification,
acceptance, commit and the growth of trees are the same for every method.

`DraftMethod`: what a checkpoint says of itself; a plain value, made before anything is loaded.
`DraftModel`: the module that drafts on one rank.

What another family would fill in (`docs/add-a-draft-method.md` has a whole example):

Block drafts (DFlash and its like), one pass that yields all tokens of a block: `capture` names the layers read;
`extend` projects the features into the draft's own KV, where no row attends, and `lookahead` is 0, since no embedding
of a later token goes in. Their one `step` reads, per request, the newest token and a mask token for each place of the
block, all of which see each other (the mask of a `DecodeBatch` is any). What the drafter must learn for them is that
the `logits` of such a step are of as many depths as it has rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from workers.distributed.tp_group import TPGroup
from workers.layers.forward_context import ForwardContext
from workers.layers.vocab import LMHead, VocabEmbedding
from workers.models.config import ModelConfig
from workers.models.decoder import DecoderOutput
from workers.models.name_map import NameMap


@dataclass(frozen=True)
class DraftMethod(ABC):
    """One draft of this method, read from its config.json and checked against its target.

    name: as `speculative.method` has it.
    lookahead: tokens after a position that the draft's KV there depends on; 1 where a row holds the next token's
    embedding.
    path: folder of its weights.
    model: of its layers; what its KV pool and its attention backends are made for.
    vocab_size: of its own vocabulary, the target's if it has none.
    capture: layers of the target whose input it reads; empty if it reads the final hidden state.
    shares_vocabulary: whether its checkpoint has neither an embedding nor a vocabulary head that it would use.
    trims_head: whether it may have some rows of the target's vocabulary head only (`speculative.drafts.trimmed_head`).
    head_rows: how many, which is then its `vocab_size`; None: it has the target's head.
    """

    name: ClassVar[str]
    lookahead: ClassVar[int] = 1
    shares_vocabulary: ClassVar[bool] = False
    trims_head: ClassVar[bool] = False

    path: str
    model: ModelConfig
    vocab_size: int
    capture: tuple[int, ...]
    head_rows: int | None = field(default=None, kw_only=True)

    def trimmed(self, rows: int | None) -> Self:
        """The draft with `rows` rows of the target's vocabulary head; itself for None, and where it has its own."""
        return replace(self, vocab_size=rows, head_rows=rows) if rows is not None and self.trims_head else self

    @classmethod
    def folder(cls, draft_path: str, target_path: str) -> str:
        """Where the checkpoint is, of the configured folders."""
        return draft_path

    @classmethod
    @abstractmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        """Whether a checkpoint with this config.json is a draft of this method."""

    @classmethod
    @abstractmethod
    def read(cls, path: str, raw: Mapping[str, Any], target: ModelConfig) -> Self:
        """From the config.json in folder `path`. Raises ValueError naming draft, target and remedy if they do not fit
        or the draft has what would be ignored."""

    @abstractmethod
    def build(self, group: TPGroup, max_position: int, device: torch.device) -> "DraftModel":
        """The model, its weights not yet loaded. max_position: more than any position in a step. device: of what it
        computes by itself, as a rotary table is."""

    @property
    @abstractmethod
    def weight_names(self) -> NameMap:
        """What the checkpoint calls the model's tensors. One that comes with its target ignores the target's."""


class DraftModel(nn.Module, ABC):
    """A draft on one rank.

    Row i of a pass pairs the feature of position i with the embedding of token i + 1, sits at position i, and predicts
    token i + 2.

    group: the ranks that share it.
    num_layers: of its own; where they are several, all but the last compute every row of `extend`.
    embed_tokens: over the target's vocabulary; `loading` makes it the target's if the checkpoint has none.
    lm_head: over the draft's; the same.
    target_ids: [draft vocabulary] int64, the target's id of each of its ids; None if they are equal.
    reads_last_layer: whether its features are the target's final hidden states, which are then computed for every row.
    """

    reads_last_layer: ClassVar[bool] = False
    embed_tokens: VocabEmbedding
    lm_head: LMHead
    target_ids: Tensor | None

    def __init__(self, method: DraftMethod, group: TPGroup) -> None:
        super().__init__()
        model = method.model
        self.group = group
        self.num_layers = model.num_layers
        self.embed_tokens = VocabEmbedding(model.vocab_size, model.hidden_size, group)
        self.lm_head = LMHead(method.vocab_size, model.hidden_size, group)
        self.target_ids = None

    @abstractmethod
    def features(self, output: DecoderOutput) -> Tensor:
        """[rows, F]: what of the target's output it reads."""

    def extend(self, ids: Tensor, features: Tensor, context: ForwardContext) -> Tensor:
        """Bring its KV up to the committed tokens: of every row, from the next tokens ids [rows] int64 and the target's
        features [rows, F]. Returns the recurrent state [n, hidden] of the rows that attend."""
        return self.step(ids, features, context)

    @abstractmethod
    def keep(self, ids: Tensor, features: Tensor, context: ForwardContext) -> None:
        """`extend` where nothing is drafted next: the KV alone, so that no row attends in the last layer."""

    @abstractmethod
    def step(self, ids: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        """One draft step: the recurrent state [n, hidden] of the rows that attend, from drafted tokens ids [rows] int64
        (the target's) and the states [rows, hidden] that they were drafted from, which it may change in place."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, shard size] over the draft's vocabulary, of recurrent states [rows, hidden]."""

    def to_target(self, ids: Tensor) -> Tensor:
        """The target's token ids of draft ids, any shape."""
        return ids if self.target_ids is None else self.target_ids[ids]
