"""An Aerie whose model takes no time: `python -m tests.bench.host.instant_server CONFIG [--no-haproxy]`.

Started as `aerie serve` starts one, with its environment; only `build` and with it the rank differ. CONFIG's
import_path is `tests.bench.host.instant_server:build`.
"""

import argparse
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from aerie.cluster.transport.sockets import temporary_folder
from aerie.workers.scheduling.plan import StepPlan, StepResult, pack_i32
from tests.bench.host.coordinator import InstantExecutor

ROUND_S = 0.008  # a round of an engine at batch 64; without it rounds would come faster than any edge can send them
DRAIN_TIMEOUT_S = 30.0
TOKENS = np.arange(600, 1400, dtype=np.int32)  # merges of the embedded tokenizer: every one shows as text


class PacedExecutor(InstantExecutor):
    """Prompts cost nothing; rounds come every `round_s`. Emits tokens that show."""

    def __init__(self, num_slots: int, round_s: float = ROUND_S) -> None:
        super().__init__(num_slots)
        self._round_s = round_s
        self._due_s: deque[float] = deque()
        self._last_due_s = 0.0

    def submit(self, plan: StepPlan) -> None:
        start_s = max(time.monotonic(), self._last_due_s)
        self._last_due_s = start_s + (self._round_s if plan.slots else 0.0)
        self._due_s.append(self._last_due_s)
        super().submit(plan)

    def take(self) -> StepResult:
        # Sleeping here and not polling in `ready`, which would cost a fifth of a core.
        time.sleep(max(0.0, self._due_s.popleft() - time.monotonic()))
        return super().take()

    def _emit(self, plan: StepPlan) -> tuple[bytes, bytes, bytes, bytes]:
        counts, tokens, finish, accepted = super()._emit(plan)
        return counts, pack_i32(np.resize(TOKENS, len(tokens) // 4)), finish, accepted


def build(args: dict[str, Any]) -> object:
    """Return what Serve calls."""
    from aerie.deploy.app import application
    from aerie.deploy.checks import planned
    from aerie.deploy.nodes import cluster_nodes
    from tests.bench.host.instant_engine import InstantEngine

    return application(planned(args, cluster_nodes()), InstantEngine)


def main() -> None:
    from aerie.deploy.haproxy import ENDING
    from aerie.deploy.serve.console import Console, show_ray_lines
    from aerie.deploy.serve.environment import silence_limit_s, use_haproxy
    from aerie.deploy.serve.launch import run_until_signal
    from aerie.deploy.serve.ray_start import start_ray
    from aerie.deploy.serve.watches import StartWatch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--no-haproxy", action="store_true")
    arguments = parser.parse_args()
    with Console(time.time(), None) as console, temporary_folder() as folder:
        if not arguments.no_haproxy:
            use_haproxy(folder, silence_limit_s(3600), console.say)
        start_ray(150)
        show_ray_lines(console)
        run_until_signal(arguments.config, folder, DRAIN_TIMEOUT_S, [], StartWatch(), folder / ENDING, console)


if __name__ == "__main__":
    sys.exit(main())
