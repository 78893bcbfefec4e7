"""What a scenario is made of, as plain values; `tests.load.matrix` has the scenarios, `tests.load.run` runs one."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aerie.deploy.bench.arrivals import Lengths

Part = Literal["worker", "coordinator", "engine", "ingress", "proxy", "proxy's manager", "raylet", "group"]


@dataclass(frozen=True)
class Hosts:
    """The nodes and what `aerie serve` is given.

    cpus: of each node that is there from the start, for Ray. None: one node, whose Ray `aerie serve` starts itself.
    args: keys of the configuration, whose sections go over the embedded pair's.
    fronts: nodes whose HTTP port the clients use, as a load balancer does: in turn, those first whose /health is 200.
    proxy_location: Serve's; "EveryNode" lets every node with an ingress answer.
    wired: nodes whose link can delay and lose frames.
    ranks: how many workers each node must have when the load begins; None: wherever Ray puts them.
    gpus: of each node, of this machine's in turn; (): no node has any, and Ray finds none.
    environment: variables of each node's processes; {node} stands for its number.
    host_names: each node has a name of its own, n1, n2, ..., so that ranks take other nodes for other hosts; else all
        have this machine's, and ranks may use what a host's processes share.
    """

    cpus: tuple[int, ...] | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    fronts: tuple[int, ...] = (1,)
    proxy_location: Literal["HeadOnly", "EveryNode"] = "HeadOnly"
    wired: tuple[int, ...] = ()
    ranks: tuple[int, ...] | None = None
    gpus: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    host_names: bool = False


@dataclass(frozen=True)
class Load:
    """An open loop; its answers' texts are known.

    rate: arrivals per second, for `seconds`; idle_s: nothing arrives before that.
    drain_s: how long answers are waited for after the last arrival.
    num_distinct: different requests, which arrive in turn; the shares of them that are
    sampled (temperature 1, a seed of their own), aborted (the client leaves after a third of the answer) and malformed
    (400 is the answer).
    """

    rate: float = 1.0
    seconds: float = 30.0
    idle_s: float = 0.0
    drain_s: float = 60.0
    prompts: Lengths = Lengths(48, 0.6, 160)
    answers: Lengths = Lengths(32, 0.4, 64)
    num_distinct: int = 12
    sampled: float = 0.25
    aborted: float = 0.0
    malformed: float = 0.0


@dataclass(frozen=True)
class Fault:
    """One act, at_s after the load's beginning. node 0: the one that an engine's coordinator was on at the first act.

    kill, stop    SIGKILL or SIGSTOP to processes of `part` on `node`, one of them or `all_of_them`
    terminate     SIGTERM to the process group of `aerie serve`
    cut, mend     the node's cable
    power         cut, then SIGKILL to everything on the node
    impair        delay_ms and loss of the node's link
    update        the same application with these `args` over the former ones, as `serve run` deploys it
    join          a new node with `cpus`
    leave         SIGTERM to the node's Ray
    """

    at_s: float
    kind: Literal["kill", "stop", "terminate", "cut", "mend", "power", "impair", "update", "join", "leave"]
    node: int = 1
    part: Part = "worker"
    all_of_them: bool = False
    delay_ms: float = 0.0
    loss: float = 0.0
    cpus: int = 2
    args: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        of_part = f" {self.part}" if self.kind in ("kill", "stop", "terminate") else ""
        link = f" {self.delay_ms:g} ms, {self.loss:.0%} loss" if self.kind == "impair" else ""
        if self.kind == "update":
            return f"update to {json.dumps(self.args)}"
        return f"{self.kind}{of_part}, node {self.node or 'of the engine'}{link}"


CUT = frozenset({"cut", "error event"})  # streams whose ingress is gone
DARK = CUT | {"no connection", "silent"}  # and clients whose own front says nothing any more


@dataclass(frozen=True)
class Expect:
    """What must hold besides that no text is ever wrong.

    stall_s: first tokens never stay away longer than this.
    untrue_s: nor does /health say 200 for longer than this while they stay away, or anything else while they come.
    errors: kinds of answers that are allowed (`tests.load.client.KINDS`); refusals in good order always are.
    clean_after_s: requests sent later than this after the last fault are answered.
    ends_s: `aerie serve` must end within this of the last fault, and leave no process behind; None: it must not end.
    growth: by how much of it no part's memory and descriptors may grow from the sixth minute to the last; None: memory
        is not looked at.
    """

    stall_s: float = 15.0
    untrue_s: float = 10.0
    errors: frozenset[str] = frozenset()
    clean_after_s: float = 15.0
    ends_s: float | None = None
    growth: float | None = None


@dataclass(frozen=True)
class Scenario:
    """name: for the command line, and of its files. says: what a reader of the table should know."""

    name: str
    says: str
    hosts: Hosts = Hosts()
    load: Load = Load()
    faults: tuple[Fault, ...] = ()
    expect: Expect = Expect()
