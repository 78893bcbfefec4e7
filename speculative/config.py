"""Configuration of speculation: draft, tree, placement."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from aerie.attention.config import MIN_WINDOW
from aerie.attention.setting import Setting, check_settings
from aerie.speculative.tree_shape import (
    MAX_COLUMNS,
    MAX_WIDTH,
    TreeShape,
    max_nodes,
    num_scratch_tokens,
    shapes_of,
    suffix_shapes,
)
from aerie.workers.config import RoundShapes

Method = Literal["eagle", "eagle3", "mtp", "dflash", "dspark", "dflash2", "domino", "suffix"]
BLOCK_METHODS = ("dflash", "dspark", "dflash2", "domino")  # methods that draft a block in one pass

MAX_MATCH = 32  # maximum length of a match that may be configured
_DEFAULT_SUFFIX_TOKENS = 15  # 16 rows with the root, which is one tile of a matrix product


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculation (EAGLE arXiv 2401.15077, EAGLE-2 2406.16858, EAGLE-3 2503.01840).

    path: folder of the draft, or its name on the hub; empty for `suffix`, and for `mtp` if it is in the target's
        folder.
    method: `eagle3` (also EAGLE-3.1 and `speculators`), `eagle` (also EAGLE-2), `mtp` (the model's own module, or
        Gemma 4's assistant), `dflash`, `dspark`, `dflash2` and `domino` (block drafts), or `suffix`: copy what
        followed the newest tokens earlier in the request's own text.
    num_steps: depth of the draft tree, for block drafts at most a block; tokens drafted by `suffix`, whose default is
        15.
    top_k: children per node; 1 drafts a chain.
    num_draft_tokens: nodes verified per round, including the root; num_steps + 1 for a chain.
    draft_tp: ranks that the draft is sharded over; 1: every rank holds all of it; none: as for the target.
    synthetic_acceptance_length: for benchmarks with dummy weights: accept drafts at random so that 1 + accepted /
        rounds has this mean (minimum-variance schedule, as in vLLM); none: verify.
    adaptive: the configured tree is the maximum; by load and acceptance, the scheduler chooses smaller tree shapes or
        no speculation. false: always the whole tree.
    window: newest tokens of a request that the draft attends to, at least 64; none: all.
    draft_vocab_size: tokens that an `mtp` module may propose (rows of its vocabulary head): the most frequent by
        `token_map.json` in the target's folder (`aerie token-map`), else the tokenizer's first; 0: all; auto: 32,768
        with a map, 65,536 without, if that is at most a third of the vocabulary, else all.
    suffix_tokens: length of a branch that copies the request's own text, in the tree of a model's draft; 0: none.
    match_min: for copied drafts: minimum number of newest tokens that must occur earlier in the text.
    match_max: for copied drafts: maximum number of newest tokens compared; the longest match is used, then the newest.
    """

    path: Annotated[
        str,
        Setting("--speculative-draft-model-path --speculative-draft-model --speculative-draft", metavar="HEAD"),
    ] = ""
    method: Method = "eagle3"
    num_steps: Annotated[
        int,
        Setting(
            "--speculative-num-steps",
            ge=1,
            rule="at least 1; to switch speculation off leave the section `speculative` out",
        ),
    ] = 3
    top_k: Annotated[int, Setting("--speculative-eagle-topk", ge=1, rule="at least 1; 1 drafts a chain")] = 1
    num_draft_tokens: Annotated[int, Setting("--speculative-num-draft-tokens")] = 4
    draft_tp: int | None = None
    synthetic_acceptance_length: float | None = None
    adaptive: Annotated[bool, Setting("--speculative-adaptive")] = True
    window: Annotated[
        int | None,
        Setting(
            "--speculative-draft-window-size",
            ge=MIN_WINDOW,
            rule=f"at least {MIN_WINDOW}; take the length of the texts that the draft was trained on, or leave it out, "
            "and it attends to the whole context",
        ),
    ] = None
    draft_vocab_size: int | Literal["auto"] = "auto"
    suffix_tokens: int = 0
    match_min: int = 2
    match_max: int = 16

    def __post_init__(self) -> None:
        check_settings(self)
        in_block = self.method in BLOCK_METHODS
        max_width = MAX_WIDTH if in_block and self.top_k > 1 and not self.suffix_tokens else MAX_COLUMNS
        if not 2 <= self.num_draft_tokens <= max_width:
            more = "" if max_width == MAX_WIDTH else f", or {MAX_WIDTH} for a block draft's tree without suffix_tokens"
            raise ValueError(f"num_draft_tokens={self.num_draft_tokens}: must be 2 to {max_width}{more}")
        if self.top_k == 1 and self.num_draft_tokens != self.num_steps + 1:
            raise ValueError(
                f"num_draft_tokens={self.num_draft_tokens}: a chain (top_k=1) has num_steps + 1 = "
                f"{self.num_steps + 1} tokens, its root included; set that, or raise top_k"
            )
        num_candidates = max_nodes(self.num_steps, self.top_k, in_block)
        if self.num_draft_tokens > num_candidates:
            raise ValueError(
                f"num_draft_tokens={self.num_draft_tokens}: a tree of num_steps={self.num_steps} and "
                f"top_k={self.top_k} has {num_candidates} nodes at most; lower it or raise those"
            )
        if not in_block and num_scratch_tokens(self.num_steps, self.top_k) > MAX_COLUMNS:
            raise ValueError(
                f"num_steps={self.num_steps}, top_k={self.top_k}: (num_steps - 1) * top_k must be at "
                f"most {MAX_COLUMNS}; lower one of them"
            )
        self._check_vocabulary()
        self._check_suffix()
        length = self.synthetic_acceptance_length
        if length is not None and not 1.0 <= length <= self.num_steps + 1:
            raise ValueError(f"synthetic_acceptance_length={length}: must be 1 to num_steps + 1 = {self.num_steps + 1}")

    def _check_vocabulary(self) -> None:
        size = self.draft_vocab_size
        if size == "auto":
            return
        if self.method != "mtp":
            raise ValueError(
                f"draft_vocab_size={size}: is only for method mtp; other heads have the vocabulary of their checkpoint"
            )
        if size < 0 or 0 < size < self.top_k:
            raise ValueError(
                f"draft_vocab_size={size}: must be at least top_k={self.top_k}, or 0 for the target's whole vocabulary"
            )

    def _check_suffix(self) -> None:
        """Raise ValueError for settings that do not fit drafts copied from earlier text."""
        copies = self.method == "suffix" or self.suffix_tokens > 0
        if not copies and (self.match_min, self.match_max) != (2, 16):
            raise ValueError(
                f"match_min={self.match_min}, match_max={self.match_max}: are only for method suffix and suffix_tokens"
                "; leave them out"
            )
        if not 1 <= self.match_min <= self.match_max <= MAX_MATCH:
            raise ValueError(
                f"match_min={self.match_min}, match_max={self.match_max}: must be 1 to {MAX_MATCH}, the first no more "
                "than the second"
            )
        if self.suffix_tokens < 0 or (copies and self.num_draft_tokens + self.suffix_tokens > MAX_COLUMNS):
            raise ValueError(
                f"suffix_tokens={self.suffix_tokens}: must be 0 to {MAX_COLUMNS - self.num_draft_tokens}, with "
                f"num_draft_tokens={self.num_draft_tokens}"
            )
        if self.suffix_tokens and self.synthetic_acceptance_length is not None:
            raise ValueError(
                f"suffix_tokens={self.suffix_tokens}: cannot be combined with synthetic_acceptance_length; leave one "
                "of them out"
            )
        if self.method != "suffix":
            return
        if self.suffix_tokens:
            raise ValueError(f"suffix_tokens={self.suffix_tokens}: with method suffix it is num_steps; leave it out")
        if self.top_k != 1:
            raise ValueError(f"top_k={self.top_k}: method suffix drafts a chain; leave it out")
        for name in ("window", "draft_tp"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}={getattr(self, name)}: method suffix has no draft model; leave it out")

    @property
    def shape(self) -> TreeShape:
        """Return the configured tree."""
        return TreeShape.of(self.num_steps, self.top_k, self.num_draft_tokens, self.method in BLOCK_METHODS)

    @property
    def shapes(self) -> RoundShapes:
        """Return the tree shapes of an engine with this configuration."""
        if self.method == "suffix":
            return suffix_shapes(self.num_steps, self.adaptive)
        return replace(shapes_of(self.shape, self.adaptive, self.suffix_tokens), drafted_by=self.method)


def with_method_defaults(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section `speculative` as the user wrote it, with its method's own defaults."""
    if section.get("method") != "suffix":
        return dict(section)
    width = section.get("num_draft_tokens")
    tokens = width - 1 if isinstance(width, int) else _DEFAULT_SUFFIX_TOKENS
    fields = {"num_steps": tokens, **section}
    steps = fields["num_steps"]
    return {"num_draft_tokens": steps + 1, **fields} if isinstance(steps, int) else fields
