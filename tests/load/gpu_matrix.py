"""Scenarios whose nodes have GPUs, all of one machine, as data: `python -m tests.load --only gpu-across ...`; skipped
with the reason where there are too few.

Texts are compared, so they must not depend on a request's company: engines run with `deterministic`, in bfloat16.
Engines without it, where our own all-reduce is to be seen, run in float32, in which near ties are rare.
"""

from typing import Any

from aerie.deploy.bench.arrivals import Lengths
from tests.load.scenario import DARK, Expect, Fault, Hosts, Load, Scenario

STEADY = Load(rate=4.0, seconds=8.0, answers=Lengths(48, 0.4, 96))
FAULTY = Load(rate=4.0, seconds=15.0, drain_s=15.0, answers=Lengths(48, 0.4, 96))
LOST = Expect(stall_s=25.0, clean_after_s=25.0)


def _args(tensor_parallel: int, replicas: int = 1, num_ingresses: int = 1, exact: bool = True) -> dict[str, Any]:
    """Small, for a quick start. exact: by `deterministic`, else by float32."""
    return {
        "model": {"device": "cuda", "dtype": "bfloat16" if exact else "float32"},
        "deterministic": exact,
        "parallel": {
            "tensor_parallel": tensor_parallel,
            "replicas": replicas,
            "strategy": "STRICT_SPREAD" if tensor_parallel > 1 else "auto",
        },
        "cache": {"memory_gb": 1.0},
        "scheduler": {"max_running": 16, "max_step_tokens": 512},
        "ingress": {"num_replicas": num_ingresses},
    }


def _across(host_names: bool, exact: bool = True, **environment: str) -> Hosts:
    """An engine of two ranks, each the only GPU of its node."""
    return Hosts(
        cpus=(4, 4),
        gpus=(1, 1),
        ranks=(1, 1),
        args=_args(2, exact=exact),
        host_names=host_names,
        environment=environment,
    )


# As on real hosts: NCCL has nothing but the network, and our own all-reduce stays off.
ACROSS = _across(host_names=True)
# One host by name: NCCL maps the other GPU's memory. By default it hands over the descriptors of allocations through
# abstract sockets, which end at a network namespace; handles of cudaIpc go with the other messages.
PEER = _across(host_names=False, NCCL_CUMEM_ENABLE="0")
# Our own all-reduce maps the other GPU's memory, and NCCL does not.
PEER_OWN = _across(host_names=False, exact=False, NCCL_HOSTID="n{node}")
# An engine on each node.
REPLICAS = Hosts(
    cpus=(4, 4),
    gpus=(1, 1),
    ranks=(1, 1),
    args=_args(1, replicas=2),
    host_names=True,
)
# The same beside a head without GPUs; all have ingresses.
REPLICAS_BESIDE_HEAD = Hosts(
    cpus=(2, 4, 4),
    gpus=(0, 1, 1),
    ranks=(0, 1, 1),
    args=_args(1, replicas=2, num_ingresses=3),
    proxy_location="EveryNode",
    fronts=(1, 2, 3),
    host_names=True,
)
# Two engines of two ranks, all on nodes of their own.
FOUR = Hosts(
    cpus=(4, 4, 4, 4),
    gpus=(1, 1, 1, 1),
    ranks=(1, 1, 1, 1),
    args=_args(2, replicas=2),
    host_names=True,
)

GPU_SCENARIOS = (
    Scenario("gpu-across", "2 GPUs: TP over two nodes, NCCL over the network", ACROSS, STEADY),
    Scenario("gpu-across-peer", "2 GPUs: TP over two nodes, NCCL over the GPUs' memory", PEER, STEADY),
    Scenario("gpu-across-own", "2 GPUs: TP over two nodes, our all-reduce over the GPUs' memory", PEER_OWN, STEADY),
    Scenario(
        "gpu-kill-worker-across",
        "2 GPUs: the far rank, NCCL over the network",
        ACROSS,
        FAULTY,
        (Fault(3.0, "kill", node=2),),
        LOST,
    ),
    Scenario(
        "gpu-kill-worker-peer",
        "2 GPUs: the far rank, NCCL over the GPUs' memory",
        PEER,
        FAULTY,
        (Fault(3.0, "kill", node=2),),
        LOST,
    ),
    Scenario(
        "gpu-replicas-kill",
        "2 GPUs: an engine on each of two nodes, the rank of one killed",
        REPLICAS,
        FAULTY,
        (Fault(3.0, "kill", node=2),),
        LOST,
    ),
    Scenario(
        "gpu-replicas-power",
        "2 GPUs: an engine on each of two nodes, one of which loses power",
        REPLICAS_BESIDE_HEAD,
        FAULTY,
        (Fault(3.0, "power", node=3),),
        Expect(stall_s=15.0, clean_after_s=12.0, errors=DARK),
    ),
    Scenario(
        "gpu-four-kill",
        "4 GPUs: two engines of two nodes each, a rank killed",
        FOUR,
        FAULTY,
        (Fault(3.0, "kill", node=4),),
        LOST,
    ),
    Scenario(
        "gpu-four-power",
        "4 GPUs: two engines of two nodes each, one node loses power",
        FOUR,
        FAULTY,
        (Fault(3.0, "power", node=4),),
        LOST,
    ),
)
