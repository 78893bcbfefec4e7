"""Which experts ran: what engines record through trees, shared prefixes and preemptions, against transformers."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch

from aerie.attention.config import CacheConfig
from aerie.cluster.coordinator.expert_reads import ExpertReads
from aerie.speculative.build import local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import SchedulerConfig
from aerie.workers.runner.commands import CommandHandlers
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.commands.command import ReadRoutedExperts, RoutedExperts, first_error
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request, RequestOutput
from tests.speculative.conftest import Pair, forked_ranks, make_pair, one_thread  # noqa: F401 - fixtures
from tests.support.scripted import scripted_output

QWEN = {
    "architecture": "Qwen3Moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [1],
}
RECORDED = CacheConfig(page_size=4, num_pages=400, routed_experts=True)


@pytest.fixture(scope="module")
def experts_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("experts"), **QWEN)  # type: ignore[arg-type]


def answered(engine: LocalEngine, prompts: list[list[int]], num_tokens: int = 14) -> list[tuple[Request, np.ndarray]]:
    """Requests that have ended, half of them sampled, and their records."""
    files: dict[str, bytes] = {}

    def ready(outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.error is None
            files[output.request.request_id] = output.routed_experts

    reads = ExpertReads(engine.scheduler, ready)
    requests = [
        Request(f"r{i}", prompt, SamplingParams(num_tokens + i, 0.8 * (i % 2), seed=i, routed_experts=True))
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.scheduler.submit(request)
    while len(files) < len(requests):
        reads.take(engine.step())
    return [(request, np.load(io.BytesIO(files[request.request_id]))) for request in requests]


def chosen_by_transformers(target: Path, tokens: list[int]) -> np.ndarray:
    """[tokens, layers, 3], each row's experts sorted; zeros in layers without experts."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    logits: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):

            def note(module: object, inputs: tuple[torch.Tensor, ...], out: object, index: int = index) -> None:
                weight = module.weight  # type: ignore[attr-defined]
                logits[index] = inputs[0].flatten(0, -2).float() @ weight.float().T

            layer.mlp.gate.register_forward_hook(note)
    with torch.no_grad():
        model(torch.tensor([tokens]))
    found = np.zeros((len(tokens), len(model.model.layers), 3), np.uint8)
    for index, values in logits.items():
        found[:, index] = values.topk(3).indices.sort().values.numpy()
    return found


def check(target: Path, request: Request, record: np.ndarray) -> None:
    tokens = [*request.prompt, *request.output][:-1]
    assert record.dtype == np.uint8 and record.shape[0] == len(tokens)
    assert (np.sort(record, axis=-1) == chosen_by_transformers(target, tokens)).all()


@pytest.mark.parametrize("shape", ["none", "chain", "tree"])
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_the_experts_of_committed_tokens_are_those_of_a_plain_pass(
    experts_pair: Pair, shape: str, tensor_parallel: int
) -> None:
    speculative = {"none": None, "chain": experts_pair.chain(), "tree": experts_pair.tree()}[shape]
    spec = experts_pair.spec(speculative, RECORDED, tensor_parallel=tensor_parallel)
    with local_engine(spec) as engine:
        for request, record in answered(engine, experts_pair.prompts):
            check(experts_pair.target, request, record)
            assert record[:, 1].max() == 0, "a layer with an MLP"
            if shape != "none":
                assert sum(request.acceptance_histogram[1:]) > 0, "no draft was accepted"


def test_cached_prefixes_and_preempted_requests_have_whole_records(experts_pair: Pair) -> None:
    few = CacheConfig(page_size=4, num_pages=40, routed_experts=True)
    common = list(range(2, 26))
    prompts = [[*common, 30 + i] for i in range(6)]
    with local_engine(experts_pair.spec(experts_pair.tree(), few)) as engine:
        first = answered(engine, prompts, 20)
        again = answered(engine, [[*common, 50 + i] for i in range(6)], 20)
        for request, record in [*first, *again]:
            check(experts_pair.target, request, record)
        assert any(request.num_preemptions for request, _ in first)
        assert any(request.cached_tokens for request, _ in again)


def test_more_than_256_experts_take_two_bytes(tmp_path: Path) -> None:
    from aerie.attention.kv_cache.layout import ExpertIds

    assert ExpertIds(256, 8).bytes_per_token == 8 and ExpertIds(257, 8).bytes_per_token == 16


def test_engines_that_do_not_record_lack_the_command_and_dense_models_are_refused(
    experts_pair: Pair, tmp_path: Path
) -> None:
    dense = make_pair(tmp_path)
    refused = pytest.raises(ValueError, match=r"cache.routed_experts=true: LlamaForCausalLM has no routers")
    with refused, local_engine(dense.spec(None, RECORDED)):
        pass
    errors: list[str] = []
    scheduler = SchedulerConfig(max_running=2)
    with local_engine(experts_pair.spec(SpeculativeConfig(method="suffix"), scheduler=scheduler)) as engine:
        work = ReadRoutedExperts(((1,),), (1,))
        engine.scheduler.add_command(work, lambda answers: errors.append(first_error(answers)))
        while not errors:
            engine.step()
    assert "do not carry out ReadRoutedExperts" in errors[0]


def test_the_last_tokens_wait_for_the_record_and_fail_with_the_ranks(make_bed) -> None:
    bed = make_bed(delay_s=0.002)
    ranks = bed.new_ranks()
    reads: list[ReadRoutedExperts] = []
    fails = [False]

    def read(work: ReadRoutedExperts) -> RoutedExperts:
        if fails[0]:
            raise ValueError("no memory")
        reads.append(work)
        return RoutedExperts(tuple(b"file" for _ in work.pages))

    for rank, executor in enumerate(ranks.executors):
        handlers = CommandHandlers(rank)
        handlers.add(ReadRoutedExperts, read)
        executor.carry_out = lambda command, handlers=handlers: (handlers.carry_out(command),)
    ranks.start()
    bed.coordinator.attach(ranks.endpoints, 1)
    bed.generate("plain", max_tokens=6)
    sampling = bed.generate("a", max_tokens=9, routed_experts=True)
    assert bed.ingress.read_end("a").routed_experts == b"file" and bed.ingress.read_end("plain").routed_experts == b""
    assert bed.ingress.tokens("a") == scripted_output(5, sampling)
    assert reads and reads[0].num_tokens == (5 + 9 - 1,) and len(reads[0].pages[0]) >= 1
    fails[0] = True
    bed.generate("b", max_tokens=9, routed_experts=True)
    end = bed.ingress.read_end("b")
    assert end.finish == "error" and "its routed experts were lost" in (end.error or "") and "no memory" in end.error
