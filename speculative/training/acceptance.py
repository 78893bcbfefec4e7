"""Greedy chain acceptance, computed from which drafted tokens match the target's text.

Under greedy verification the served text is the target's own, so a chain drafted at any place of that text can be
judged by teacher forcing: the draft's step s counts only while steps before it matched, and then its inputs were
the text's own tokens. This makes acceptance exact and parallel over a whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class AcceptanceTally:
    """Rounds, and for each depth how often a draft token was judged there (`offered`) and accepted (`accepted`)."""

    offered: list[int]
    accepted: list[int]
    num_rounds: int = 0

    @classmethod
    def empty(cls, depth: int) -> AcceptanceTally:
        return cls([0] * depth, [0] * depth)

    def acceptance_length(self) -> float:
        """Mean tokens a round yields: 1 + accepted / rounds."""
        return 1 + sum(self.accepted) / max(self.num_rounds, 1)

    def per_depth(self) -> list[float]:
        """Share accepted at each depth among the rounds whose earlier depths were accepted."""
        return [accepted / max(offered, 1) for accepted, offered in zip(self.accepted, self.offered, strict=True)]


def add_rounds(tally: AcceptanceTally, matches: Sequence[Sequence[bool]], num_prompt: int, length: int) -> None:
    """Plays the rounds of one sequence and adds them to the tally.

    `matches[s][n]` says whether the draft anchored at position n proposes, as its step s, the text's token n + s + 2.
    The first round starts with the answer's first token (position `num_prompt`) as bonus token; a round accepts the
    run of matches, at most the tally's depth and never past the end of the text.
    """
    depth = len(tally.offered)
    anchor = num_prompt - 1
    while anchor + 2 < length:
        run = 0
        while run < depth and anchor + run + 2 < length:
            tally.offered[run] += 1
            if not matches[run][anchor]:
                break
            tally.accepted[run] += 1
            run += 1
        tally.num_rounds += 1
        anchor += run + 1
