"""Models with clear routers on a CPU: right experts pass in bfloat16, experts that are wrong in a row do not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.speculative.build import EngineSpec, local_engine
from aerie.workers.layers import experts_method
from tests.support.known_models import make_known
from tests.support.slow import slow
from tests.support.targets.clear_routers import check_greedy_in_bfloat16, clear_routers
from tests.support.tiny_models import make_target
from tests.workers.models.test_targets import GREEDY, prompts, worker_of

MAKERS: dict[str, Callable[[Path], Path]] = {
    "mixtral": lambda folder: make_known(folder, "mixtral"),  # by the adapter
    **{name: lambda folder, name=name: make_target(folder, architecture=name) for name in ("GptOss", "Glm4Moe")},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", ["mixtral", *slow("GptOss", "Glm4Moe")])
def test_only_answers_of_the_right_experts_pass(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = clear_routers(MAKERS[name](tmp_path))
    check_greedy_in_bfloat16(prompts(), answers(target), target)
    right = experts_method.grouped_experts

    def wrong_in_the_last_row(x: Tensor, chosen: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        chosen = chosen.clone()
        chosen[-1] = (chosen[-1] + 1) % 4
        return right(x, chosen, weight, *rest)

    monkeypatch.setattr(experts_method, "grouped_experts", wrong_in_the_last_row)
    with pytest.raises(AssertionError, match="beyond what rounding may change"):
        check_greedy_in_bfloat16(prompts(), answers(target), target)


def answers(target: Path) -> list[list[int]]:
    torch.set_num_threads(1)
    worker = worker_of(target)
    worker = replace(worker, model=replace(worker.model, dtype="bfloat16"))
    with local_engine(EngineSpec(worker)) as engine:
        return [request.output for request in engine.generate(prompts(), GREEDY, 4)]
