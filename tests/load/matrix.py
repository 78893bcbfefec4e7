"""The scenarios of `make load`, as data; those with GPUs are in `tests.load.gpu_matrix`. All serve the embedded pair;
rates suit two cores."""

from aerie.deploy.bench.arrivals import Lengths
from tests.load.gpu_matrix import GPU_SCENARIOS
from tests.load.scenario import CUT, DARK, Expect, Fault, Hosts, Load, Scenario

ONE = Hosts()
# An engine that lies across the link, though either node could hold it.
ACROSS = Hosts(cpus=(2, 2), wired=(2,), ranks=(1, 1), args={"parallel": {"strategy": "STRICT_SPREAD"}})
# The head runs Ray's control and an ingress; any of the others can hold the whole engine.
SPARE = Hosts(cpus=(1, 2, 2), proxy_location="EveryNode", fronts=(1, 2, 3), args={"ingress": {"num_replicas": 3}})
# An engine on each of two nodes beside the head.
TWO_ENGINES = Hosts(
    cpus=(1, 2, 2),
    proxy_location="EveryNode",
    fronts=(1, 2, 3),
    args={"parallel": {"replicas": 2}, "ingress": {"num_replicas": 3}},
)
USUAL = Load()
SHORT = Load(rate=2.0, seconds=8.0, answers=Lengths(16, 0.4, 32), num_distinct=6)
PATIENT = Expect(stall_s=90.0, untrue_s=30.0, clean_after_s=90.0)  # for `make test`, on machines of any speed
SLOW = Load(rate=0.3, seconds=40.0, answers=Lengths(8, 0.4, 12), num_distinct=4)


def _one(name: str, says: str, *faults: Fault, load: Load = USUAL, **expect: object) -> Scenario:
    return Scenario(name, says, ONE, load, faults, Expect(**expect))  # type: ignore[arg-type]


SCENARIOS = (
    Scenario("short", "one node, a worker killed", ONE, SHORT, (Fault(3.0, "kill"),), PATIENT),
    _one("steady", "nothing happens", stall_s=5.0),
    Scenario(
        "mixed",
        "a third of the clients leave, half of the requests sampled; logs as JSON",
        Hosts(args={"log_format": "json"}),
        Load(sampled=0.5, aborted=0.33),
    ),
    _one("overload", "twelve times the rate", load=Load(rate=18.0, seconds=30.0, answers=Lengths(64, 0.4, 128))),
    Scenario(
        "soak",
        "half an hour of everything, with a cache that is always full",
        Hosts(args={"cache": {"memory_gb": 0.05}}),
        Load(
            rate=1.5,
            seconds=1800.0,
            prompts=Lengths(200, 1.0, 1200),
            answers=Lengths(32, 0.6, 128),
            num_distinct=60,
            sampled=0.5,
            aborted=0.15,
            malformed=0.1,
        ),
        expect=Expect(growth=0.03),
    ),
    _one("kill-worker", "", Fault(8.0, "kill")),
    _one("stop-worker", "detected in 10 s, then a start", Fault(8.0, "stop"), load=Load(seconds=90), stall_s=25.0),
    _one(
        "stop-worker-idle",
        "stopped 15 s before the first request",
        Fault(1.0, "stop"),
        load=Load(seconds=60, idle_s=16.0),
        clean_after_s=30.0,
    ),
    _one(
        "kill-coordinator",
        "with a queue",
        Fault(8.0, "kill", part="coordinator"),
        load=Load(rate=4.0, seconds=30.0),
        stall_s=20.0,
        clean_after_s=20.0,
    ),
    _one("kill-engine", "the replica's actor", Fault(8.0, "kill", part="engine"), stall_s=25.0, clean_after_s=25.0),
    _one(
        "stop-engine",
        "the replica's actor",
        Fault(8.0, "stop", part="engine"),
        load=Load(seconds=90),
        stall_s=35.0,
        clean_after_s=35.0,
    ),
    _one(
        "kill-ingress",
        "of one, or of two where there are more cores",
        Fault(8.0, "kill", part="ingress"),
        errors=CUT,
        stall_s=10.0,
    ),
    _one(
        "kill-proxy",
        "HAProxy; back within 3 s",
        Fault(8.0, "kill", part="proxy"),
        errors=CUT | {"no connection"},
        stall_s=5.0,
        clean_after_s=4.0,
    ),
    _one(
        "kill-proxy-manager",
        "and HAProxy with it",
        Fault(8.0, "kill", part="proxy's manager"),
        errors=CUT | {"no connection"},
        stall_s=8.0,
        clean_after_s=8.0,
    ),
    _one(
        "kill-raylet",
        "of the one node: `aerie serve` must end",
        Fault(8.0, "kill", part="raylet"),
        load=Load(seconds=25.0, drain_s=15.0),
        errors=CUT | {"no connection", "500", "silent"},
        ends_s=15.0,
        untrue_s=15.0,
    ),
    _one(
        "terminate-group",
        "SIGTERM to the process group: drains, or ends within 10 s",
        Fault(8.0, "terminate", part="group"),
        load=Load(seconds=20.0, drain_s=45.0),
        errors=CUT | {"no connection"},
        ends_s=35.0,
    ),
    Scenario(
        "update",
        "another configuration for the only engine and both ingresses",
        Hosts(args={"ingress": {"num_replicas": 2}}),
        Load(seconds=70.0),
        (Fault(8.0, "update", args={"scheduler": {"max_waiting": 300}}),),
        Expect(stall_s=25.0),
    ),
    Scenario(
        "update-replicas",
        "from one engine to two",
        Hosts(cpus=(4,)),
        Load(seconds=70.0),
        (Fault(8.0, "update", args={"parallel": {"replicas": 2}}),),
    ),
    Scenario("across", "TP over two nodes", ACROSS, Load(rate=0.7)),
    Scenario(
        "across-delay",
        "TP over two nodes, 20 ms each way",
        ACROSS,
        SLOW,
        (Fault(0.0, "impair", node=2, delay_ms=20.0),),
        Expect(stall_s=40.0, clean_after_s=0.0),
    ),
    Scenario(
        "across-loss",
        "TP over two nodes, 5 % of the frames lost each way",
        ACROSS,
        SLOW,
        (Fault(0.0, "impair", node=2, loss=0.05),),
        Expect(stall_s=60.0, clean_after_s=0.0),
    ),
    Scenario(
        "kill-worker-across",
        "the far rank",
        ACROSS,
        Load(rate=0.7, seconds=60.0),
        (Fault(8.0, "kill", node=2),),
        Expect(stall_s=25.0, clean_after_s=25.0),
    ),
    Scenario(
        "cut-worker-across",
        "the far rank's node for 20 s, whose Ray ends and is started again; no other node has room",
        ACROSS,
        Load(rate=0.7, seconds=80.0),
        (Fault(8.0, "cut", node=2), Fault(28.0, "mend", node=2), Fault(30.0, "join", node=2, cpus=2)),
        Expect(stall_s=60.0, clean_after_s=45.0),
    ),
    Scenario(
        "cut-engine-node",
        "engine and an ingress unreachable; a spare node has room",
        SPARE,
        Load(rate=1.0, seconds=80.0),
        (Fault(8.0, "cut", node=0),),
        Expect(stall_s=30.0, clean_after_s=30.0, errors=DARK),
    ),
    Scenario(
        "power-engine-node",
        "engine, coordinator, ingress gone at once; a spare node has room",
        SPARE,
        Load(rate=1.0, seconds=80.0),
        (Fault(8.0, "power", node=0),),
        Expect(stall_s=30.0, clean_after_s=30.0, errors=DARK),
    ),
    Scenario(
        "kill-raylet-engine-node",
        "a spare node has room",
        SPARE,
        Load(rate=1.0, seconds=70.0),
        (Fault(8.0, "kill", node=0, part="raylet"),),
        Expect(stall_s=30.0, clean_after_s=30.0, errors=CUT | {"no connection"}),
    ),
    Scenario(
        "two-engines-power",
        "one of two engines loses power; the other serves on",
        TWO_ENGINES,
        Load(rate=1.5, seconds=60.0),
        (Fault(8.0, "power", node=0),),
        Expect(stall_s=15.0, clean_after_s=30.0, errors=DARK),
    ),
    Scenario(
        "four-nodes-power",
        "two engines of two nodes each; one node loses power",
        Hosts(cpus=(1, 1, 1, 1), args={"parallel": {"replicas": 2, "strategy": "STRICT_SPREAD"}}),
        Load(rate=1.0, seconds=60.0),
        (Fault(8.0, "power", node=4),),
        Expect(stall_s=25.0, clean_after_s=25.0),
    ),
    Scenario(
        "node-joins",
        "the second engine comes with its node, and leaves with it",
        Hosts(cpus=(2,), args={"parallel": {"replicas": 2, "autoscaling": True}}, ranks=(2,)),
        Load(rate=1.0, seconds=70.0),
        (Fault(5.0, "join", node=2, cpus=2), Fault(45.0, "leave", node=2)),
        Expect(stall_s=15.0, clean_after_s=15.0),
    ),
    *GPU_SCENARIOS,
)


def find(names: list[str]) -> list[Scenario]:
    """Scenarios of these names, all but "short" and "soak" for none. Raises ValueError with the names that exist."""
    by_name = {scenario.name: scenario for scenario in SCENARIOS}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ValueError(f"no scenario {', '.join(unknown)}; there are {', '.join(by_name)}")
    return (
        [by_name[name] for name in names]
        if names
        else [each for each in SCENARIOS if each.name not in ("short", "soak")]
    )
