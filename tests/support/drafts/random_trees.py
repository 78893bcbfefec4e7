"""Candidates of draft trees, without a draft."""

import torch

from aerie.kernels.tree.nodes import Candidates


def random_candidates(batch: int, top_k: int, steps: int, seed: int) -> Candidates:
    """Candidates as the drafter makes them: top_k under the root, then top_k under each of the top_k best."""
    generator = torch.Generator().manual_seed(seed)
    tokens, scores, parents, depths = [], [], [], []
    expanded = torch.full((batch, 1), -1)
    best = torch.zeros(batch, 1)
    offset = 0
    for depth in range(1, steps + 1):
        # a coarse grid makes equal scores common
        new = best.unsqueeze(2) - torch.randint(0, 4, (batch, expanded.shape[1], top_k), generator=generator) * 0.5
        score = new.flatten(1)
        tokens.append(torch.stack([torch.randperm(99, generator=generator)[: score.shape[1]] for _ in range(batch)]))
        scores.append(score)
        parents.append(expanded.repeat_interleave(top_k, dim=1))
        depths.append(torch.full((score.shape[1],), depth))
        best, chosen = score.topk(top_k, dim=1)
        expanded = chosen + offset
        offset += score.shape[1]
    return Candidates(torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1), torch.cat(depths), steps)
