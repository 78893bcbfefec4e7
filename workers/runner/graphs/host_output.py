"""Copies a step's output to the host. Used by `aerie.workers.runner.worker`."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aerie.kernels.capability import Capability
from aerie.workers.runner.batch import StepTensors
from aerie.workers.sampling import Logprobs, PromptRanking


@dataclass(frozen=True)
class HostOutput:
    """A step's output on the host, copied because the next replay overwrites it on the device. Valid after `wait`.

    rows: [n, M + 3 + X + E + 2 W] int64. Columns: tokens [M], count, finish, accepted, `StepTensors.matches` [X],
        `StepTensors.min_entropies` [E], and with grammars `StepTensors.drafts` [2 W].
    num_tokens: M.
    logprobs: log-probabilities of the emitted tokens; None if not requested.
    copied: recorded after the copy; None on devices without streams, where nothing is copied.
    prompt: log-probabilities of prompt tokens; None if not requested.
    num_matches: X, 3 or 0.
    num_entropies: E, 1 or 0.
    """

    rows: Tensor
    num_tokens: int
    logprobs: Logprobs | None
    copied: torch.cuda.Event | None
    prompt: PromptRanking | None = None
    num_matches: int = 0
    num_entropies: int = 0

    @staticmethod
    def of(tensors: StepTensors) -> "HostOutput":
        """Start the copy to the host, without waiting for it."""
        columns = [tensors.tokens, torch.stack((tensors.counts, tensors.finish, tensors.accepted), dim=1)]
        num_matches = 0 if tensors.matches is None else tensors.matches.shape[1]
        num_entropies = 0 if tensors.min_entropies is None else 1
        entropies = None if tensors.min_entropies is None else tensors.min_entropies.unsqueeze(1)
        columns += [extra.flatten(1) for extra in (tensors.matches, entropies, tensors.drafts) if extra is not None]
        rows, num_tokens = torch.cat(columns, dim=1), tensors.tokens.shape[1]
        if not Capability.of(rows.device).has_streams:
            return HostOutput(
                rows, num_tokens, tensors.logprobs, None, tensors.prompt_logprobs, num_matches, num_entropies
            )
        logprobs, prompt = tensors.logprobs, tensors.prompt_logprobs
        if prompt is not None:
            prompt = PromptRanking(*map(_start_copy, (prompt.logprobs, prompt.ranks, prompt.top_ids, prompt.top)))
        if logprobs is not None:
            logprobs = Logprobs(*(_start_copy(t) for t in (logprobs.chosen, logprobs.top_ids, logprobs.top)))
        host = _start_copy(rows)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return HostOutput(host, num_tokens, logprobs, copied, prompt, num_matches, num_entropies)

    def is_here(self) -> bool:
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()

    @property
    def tokens(self) -> Tensor:
        """[n, M] int64; the first `counts` of a row are valid."""
        return self.rows[:, : self.num_tokens]

    @property
    def counts(self) -> Tensor:
        """[n] int64."""
        return self.rows[:, self.num_tokens]

    @property
    def finish(self) -> Tensor:
        """[n] int64, FINISH_*."""
        return self.rows[:, self.num_tokens + 1]

    @property
    def columns(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return tokens, count, finish and accepted [n, M + 3]; matches [n, X]; min-entropies [n, E]. As numpy arrays,
        whose slices take a tenth of torch's time."""
        rows, matches_at = self.rows.numpy(), self.num_tokens + 3
        entropies_at = matches_at + self.num_matches
        end = entropies_at + self.num_entropies
        return rows[:, :matches_at], rows[:, matches_at:entropies_at], rows[:, entropies_at:end]

    @property
    def drafts(self) -> Tensor | None:
        """[n, 2, W] int64; None without grammars or a draft."""
        rest = self.rows[:, self.num_tokens + 3 + self.num_matches + self.num_entropies :]
        return rest.view(rest.shape[0], 2, rest.shape[1] // 2) if rest.shape[1] else None


def _start_copy(tensor: Tensor) -> Tensor:
    """Start a copy to pinned host memory."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
