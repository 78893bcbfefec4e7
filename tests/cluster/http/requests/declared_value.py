"""A server's modules with one more declaration in `SamplingParams`, inserted before they are imported. Run as a process
by `tests.cluster.http.requests.test_declared_values`; prints what it saw as JSON."""

import asyncio
import json
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

from tests.support.repository.changed_module import import_changed

BEFORE = "    routed_experts: bool = False\n\n    @property\n"
WARMTH = (
    "    warmth: Annotated[float, "
    'Value(gt=0.0, le=3.0, server_default=True, on_device=True, use="filter", generate_name="heat")] = 0.25\n'
)


def insert() -> None:
    """Import `SamplingParams` from its source with the declaration `WARMTH`."""
    import_changed("aerie.workers.scheduling.plan", (BEFORE, WARMTH + BEFORE))


async def over_http() -> dict[str, Any]:
    """Send a value to every endpoint; return the engine's, and replies to values that are not valid."""
    from tests.support.edge_client import CHAT, HELLO, PROMPT, RESPONSES, TEXT, in_process
    from tests.support.fake_engine import FakeEngine, says

    own = {"warmth": 1.5}
    bodies: dict[str, dict[str, Any]] = {
        CHAT: HELLO | own,
        TEXT: PROMPT | own,
        RESPONSES: {"input": "hi"} | own,
        "/v1/messages": HELLO | {"max_tokens": 3} | own,
        "/generate": {"text": "hi", "sampling_params": {"heat": 1.5}},
    }
    engine = FakeEngine(says("x"))
    async with in_process(engine, default_warmth=0.75) as client:
        statuses = [(await client.post(route, json=body)).status_code for route, body in bodies.items()]
        statuses.append((await client.post(TEXT, json=PROMPT)).status_code)
        bad = (await client.post(CHAT, json=HELLO | {"warmth": 3.5})).json()["error"]
        heat = (await client.post("/generate", json={"text": "hi", "sampling_params": {"heat": 0}})).json()["error"]
        card = (await client.get("/v1/models")).json()["data"][0]["default_sampling_params"]
    return {
        "statuses": statuses,
        "values": [call.sampling.warmth for call in engine.calls],
        "bad": (bad["param"], bad["message"]),
        "bad at /generate": (heat["param"], heat["message"]),
        "card": card["warmth"],
        "sampling": engine.calls[0].sampling,
    }


def on_device(sampling: Any) -> dict[str, Any]:
    """Send a request through both messages to a slot; return its row, and what a kernel's tables are given."""
    import torch
    from torch import Tensor

    from aerie.cluster.transport.encoding import decode, encode
    from aerie.cluster.transport.messages import GenerateRequest
    from aerie.workers.scheduling.plan import SlotInit, StepPlan, pack_i32
    from aerie.workers.slots import SlotTable
    from tests.support.slots import apply_plan

    @dataclass
    class KernelTables:
        seed: Tensor
        warmth: Tensor

    request = decode(encode(GenerateRequest("a", pack_i32([1, 2]), sampling)))
    assert isinstance(request, GenerateRequest)
    plan = decode(encode(StepPlan(0, 0, b"", 0, 0, inits=(SlotInit(1, 0, 2, 9, request.sampling),))))
    assert isinstance(plan, StepPlan)
    table = SlotTable(3, 2, 16, torch.device("cpu"))
    apply_plan(table, plan)
    view = table.view(KernelTables)
    assert [field.name for field in fields(view)] == ["seed", "warmth"]
    return {"row": view.warmth.tolist(), "dtype": str(view.warmth.dtype), "filtered": table.facts[1].is_filtered}


def in_python() -> dict[str, Any]:
    """Use the value in the Python interface."""
    from aerie.deploy.offline.sampling_params import SamplingParams

    given: dict[str, Any] = {"warmth": 2.0}
    try:
        SamplingParams(**{"warmth": -1.0})
    except ValueError as error:
        return {"body": vars(SamplingParams(**given).body())["warmth"], "error": str(error)}
    raise AssertionError("no error")


def at_start() -> str:
    """Return the error of a configuration's default that is out of bounds."""
    from aerie.cluster.http.config import EdgeConfig

    given: dict[str, Any] = {"default_warmth": 9.0}
    try:
        EdgeConfig(**given)
    except ValueError as error:
        return str(error)
    raise AssertionError("no error")


def main() -> None:
    insert()
    seen = asyncio.run(over_http())
    sampling: ModuleType | Any = seen.pop("sampling")
    print(json.dumps(seen | {"device": on_device(sampling), "python": in_python(), "start": at_start()}))


if __name__ == "__main__":
    main()
