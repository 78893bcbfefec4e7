"""The report of step costs that a start prints."""

import dataclasses
import subprocess
import sys

from aerie.attention.config import CacheConfig
from aerie.cluster.replica.plan_report import cost_line
from aerie.workers.config import PLAIN, RoundShape, RoundShapes, SchedulerConfig
from aerie.workers.engine_layout import EngineLayout
from aerie.workers.scheduling.cost_table import CostTable, RoundCosts

COSTS = CostTable(
    rounds=(RoundCosts((1, 32), (4.2, 5.1), (0.0, 0.0)), RoundCosts((1, 32), (4.9, 6.9), (0.0, 0.0))),
    chunk_requests=(0, 32),
    chunk_tokens=(16, 512),
    chunk_ms=((5.2, 13.0), (9.9, 18.0)),
    mixed_shapes=(1, 1),
)
CHAIN = RoundShape(name="3/1/4", width=4, max_new_tokens=4, draft_tokens=2)


def test_costs_are_one_line_with_the_target_and_where_it_is_from() -> None:
    layout = EngineLayout(RoundShapes((PLAIN, CHAIN), default=1), SchedulerConfig(32, 512), CacheConfig(), 100, 100, 1)
    line = cost_line(layout, COSTS)
    assert line.startswith("ms of a round of 1 / 8 / 32: plain 4.2 / 4.4 / 5.1, 3/1/4 4.9 / 5.35 / 6.9; ")
    assert "of 512 prompt tokens 13; " in line and line.endswith("itl_target_ms 15.5 (auto)")  # half way from 13 to 18
    chosen = dataclasses.replace(layout, scheduler=SchedulerConfig(3, 512, itl_target_ms=25))
    assert "of 1 / 3: plain 4.2 / 4.26, " in cost_line(chosen, COSTS)
    assert cost_line(chosen, COSTS).endswith("itl_target_ms 25")


def test_layouts_need_no_torch() -> None:
    """They travel to the coordinator, which would wait seconds for it."""
    room = "aerie.cluster.replica"
    code = f"import sys, {room}.worker_actor, {room}.supervisor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
