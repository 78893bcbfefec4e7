"""Weights that a trainer sends over gloo while an engine runs: texts are those of an engine that was started with them,
steps go on meanwhile, and what does not fit changes nothing."""

import contextlib
import math
import os
import random
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from aerie.cluster.coordinator.draft_canary import DraftCanary
from aerie.cluster.transport.admin import JoinTrainer
from aerie.speculative.build import local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.distributed.ports import free_port
from aerie.workers.distributed.weight_transfer.group import TransferError
from aerie.workers.distributed.weight_transfer.sender import WeightSender
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.runner.transfer import receive_memory
from aerie.workers.scheduling.commands.command import OpenTransfer, ReceiveWeights, SumWeights, first_error
from aerie.workers.scheduling.cost_table import CostTable, RoundCosts
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request
from tests.speculative.commands.test_weight_updates import (
    GREEDY,
    Version,
    answers_of,
    other,  # noqa: F401 - a fixture
    speculation,
    started_with,
)
from tests.speculative.commands.trainer import Trainer, received
from tests.speculative.conftest import Pair
from tests.support.drafts.block_reference import head_for, make_block_head
from tests.support.ranks import fresh_processes

NORM, HEAD = "model.norm.weight", "lm_head.weight"


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(str(folder / "model.safetensors"))


@pytest.mark.parametrize(
    ("kind", "tensor_parallel", "packed", "staged_on"),
    [
        ("plain", 1, False, "device"),
        ("chain", 1, True, "host"),
        ("tree", 2, True, "device"),
    ],
)
def test_sent_weights_give_the_texts_of_an_engine_started_with_them(
    pair: Pair,
    other: Version,  # noqa: F811
    kind: str,
    tensor_parallel: int,
    packed: bool,
    staged_on: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if staged_on == "host":  # as on a device that is full, in pieces that end within rows
        monkeypatch.setattr(receive_memory, "SPARE_BYTES", math.inf)
        monkeypatch.setattr(receive_memory, "PIECE_BYTES", 1000)
    with local_engine(started_with(pair, other, kind)) as engine:
        expected = answers_of(engine, pair.prompts[:3], "b")
    with local_engine(pair.spec(speculation(pair, kind), tensor_parallel=tensor_parallel)) as engine:
        before = answers_of(engine, pair.prompts[:3], "a")
        trainer = Trainer(engine, tensor_parallel, packed)
        assert trainer.join() == trainer.start() == ""
        new = tensors_of(other.target)
        names = sorted(new)
        parts = [{name: new[name] for name in names[i::2]} for i in range(2)]
        for part in parts:
            assert trainer.update(part) == ""
        assert answers_of(engine, pair.prompts[:3], "c") == before, "nothing changes before the end"
        error, loaded = trainer.finish("step-1")
        assert error == "" and loaded.missing["target"] == () and engine.scheduler.weights.version == "step-1"
        if kind != "plain":
            assert len(loaded.missing["draft"]) > 3, "no tensor of the draft has come"
            assert trainer.start("draft") == trainer.update(tensors_of(other.eagle)) == ""
            assert trainer.finish()[1].missing == {"draft": ()} and engine.scheduler.weights.version == "2"
        assert answers_of(engine, pair.prompts[:3], "b") == expected != before


def test_tensors_of_the_draft_may_come_in_the_session_of_the_target(pair: Pair, other: Version) -> None:  # noqa: F811
    """And a later update may repeat the announcement."""
    with local_engine(started_with(pair, other, "chain")) as engine:
        expected = answers_of(engine, pair.prompts[:3], "b")
    with local_engine(pair.spec(pair.chain())) as engine:
        before = answers_of(engine, pair.prompts[:3], "a")
        trainer = Trainer(engine)
        assert trainer.join() == ""
        for number, version in enumerate((other, Version(pair.target, pair.eagle), other)):
            drafts = {f"draft.{name}": tensor for name, tensor in tensors_of(version.eagle).items()}
            tensors = tensors_of(version.target) | drafts
            assert trainer.start() == ""
            work = received(tensors) if number == 0 else ReceiveWeights((), (), ())
            assert trainer.call(work, lambda tensors=tensors: trainer.send(tensors))[0] == ""
            assert trainer.finish()[1].missing == {"target": (), "draft": ()}
            found = answers_of(engine, pair.prompts[:3], f"b{number}")
            assert found == (before if number == 1 else expected)


def test_a_block_head_takes_a_draft_session(pair: Pair, tmp_path: Path) -> None:
    """Its drafts are those of an engine that was started with the sent head, and the texts stay."""
    heads = [
        make_block_head(
            tmp_path / name, pair.target, head_for(pair.target, from_anchor=True), copying=name == "copying"
        )
        for name in ("random", "copying")
    ]
    specs = [pair.spec(SpeculativeConfig(str(head), "dflash", 3, 1, 4, adaptive=False)) for head in heads]
    with local_engine(specs[1]) as engine:
        expected = answers_of(engine, pair.prompts[:3], "x")
    with local_engine(specs[0]) as engine:
        before = answers_of(engine, pair.prompts[:3], "a")
        trainer = Trainer(engine)
        assert trainer.join() == trainer.start("draft") == trainer.update(tensors_of(heads[1])) == ""
        assert trainer.finish()[1].missing == {"draft": ()}
        found = answers_of(engine, pair.prompts[:3], "b")
    assert found == expected != before and [text for text, _ in found] == [text for text, _ in before]


def test_steps_go_on_while_weights_arrive(pair: Pair, other: Version) -> None:  # noqa: F811
    """A request begins and ends between the first and the last broadcast of a slow trainer."""
    with local_engine(pair.spec()) as engine:
        ((expected, _),) = answers_of(engine, pair.prompts[:1], "a")
        trainer = Trainer(engine, packed=False)
        assert trainer.join() == trainer.start() == ""
        tensors = tensors_of(other.target)
        names = list(tensors)
        request = Request("beside", pair.prompts[0], SamplingParams(len(expected), 0.0))
        ended = threading.Event()
        waits: list[bool] = []

        def send() -> None:
            trainer.send({name: tensors[name] for name in names[:3]})
            engine.scheduler.submit(request)
            waits.append(ended.wait(20))
            trainer.send({name: tensors[name] for name in names[3:]})

        step = engine.step

        def noted() -> Any:
            outputs = step()
            if any(output.finish_reason is not None for output in outputs):
                ended.set()
            return outputs

        engine.step = noted  # type: ignore[method-assign]
        assert trainer.update(tensors, send) == "" and waits == [True]
        assert request.output == expected
        assert trainer.finish()[0] == ""


def wrong(tensors: Mapping[str, Tensor]) -> list[tuple[Mapping[str, Tensor], str]]:
    """Announcements that are refused, and a part of each error."""
    norm, head = tensors[NORM], tensors[HEAD]
    nan = norm.clone()
    nan[2] = float("nan")
    return [
        ({NORM: norm, "model.nrom.weight": norm}, "unexpected: model.nrom.weight"),
        ({NORM: norm, HEAD: head[1:]}, "lm_head.weight (the transfer) has shape"),
        ({NORM: norm.int()}, "is torch.int32"),
        ({NORM: norm.double()}, "dtype 'float64' is not supported"),
        ({NORM: nan}, "NaN, infinite"),
        ({HEAD: head * float("inf")}, "NaN, infinite"),
        ({"draft.x.weight": norm}, "this engine has no draft"),
    ]


@pytest.mark.parametrize("tensor_parallel", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(pair: Pair, tensor_parallel: int) -> None:
    tensors = tensors_of(pair.target)
    with local_engine(pair.spec(tensor_parallel=tensor_parallel)) as engine:
        before = answers_of(engine, pair.prompts[:1], "a")
        trainer = Trainer(engine, tensor_parallel)
        assert "no trainer has called /init_weight_transfer_engine" in trainer.start()
        assert "this engine has no draft" in (trainer.join() or trainer.start("draft"))
        assert "no weight update is open" in trainer.update(tensors, lambda: None)
        for number, (announced, message) in enumerate(wrong(tensors)):

            def send(announced: Mapping[str, Tensor] = announced) -> None:
                with contextlib.suppress(TransferError):  # the engine leaves the group
                    trainer.send(announced)

            assert trainer.join() == trainer.start() == ""
            assert message in trainer.update(announced, send)
            assert message in trainer.finish()[0] or "no weight update is open" in trainer.finish()[0]
            assert engine.scheduler.weights.epoch == 0
            assert answers_of(engine, pair.prompts[:1], f"b{number}") == before


def test_one_session_at_a_time_and_no_tensor_twice(pair: Pair) -> None:
    tensors = tensors_of(pair.target)
    norm = {NORM: tensors[NORM]}
    with local_engine(pair.spec(pair.chain())) as engine:
        trainer = Trainer(engine)
        assert trainer.join() == trainer.start() == ""
        for model in ("target", "draft"):
            assert trainer.start(model) == "a weight update of the target is open; finish it first"
        assert "no tensor of the target has come" in trainer.finish()[0]
        assert trainer.update(norm) == "", "the first session is as it was"
        assert "came twice in this session" in trainer.update(norm, lambda: None)
        assert trainer.join() == trainer.start("draft") == "", "a new group begins anew"
        assert "names: must not be empty the first time" in trainer.update({}, lambda: None)
        found: list[str] = []
        assert trainer.join() == trainer.start() == ""

        def call_again() -> None:
            found.append(trainer._calls.call(received(norm))[0])
            trainer.send(norm)

        assert trainer.update(norm, call_again) == ""
        assert found == ["another call of a weight transfer is in progress"]


@pytest.mark.parametrize("dies", [True, False])
def test_a_trainer_that_dies_or_stops_is_noticed_in_time_and_the_next_one_succeeds(
    pair: Pair,
    other: Version,  # noqa: F811
    dies: bool,
) -> None:
    new = tensors_of(other.target)
    first = dict(list(new.items())[:2])
    with local_engine(started_with(pair, other, "plain")) as engine:
        expected = answers_of(engine, pair.prompts[:1], "x")
    with local_engine(pair.spec()) as engine:
        before = answers_of(engine, pair.prompts[:1], "a")
        trainer = Trainer(engine, packed=False)
        trainer.timeout_s = 2.0
        assert trainer.join() == trainer.start() == ""

        def begin() -> None:
            trainer.send(first)
            assert trainer.sender is not None
            if dies:
                trainer.sender.close()

        since = time.monotonic()
        assert "transfer failed" in trainer.update(new, begin)
        assert time.monotonic() - since < (1.5 if dies else 8)
        assert "transfer failed" in trainer.finish()[0] or "no weight update is open" in trainer.finish()[0]
        assert answers_of(engine, pair.prompts[:1], "b") == before
        trainer.timeout_s = 20.0
        assert trainer.join() == trainer.start() == trainer.update(new) == trainer.finish()[0] == ""
        assert answers_of(engine, pair.prompts[:1], "c") == expected


def test_a_trainer_that_does_not_come_is_named_in_time(pair: Pair) -> None:
    with local_engine(pair.spec()) as engine:
        trainer = Trainer(engine)
        trainer.timeout_s = 1.0
        since = time.monotonic()
        refused = JoinTrainer({"e": 1}, OpenTransfer("127.0.0.1", free_port(), 1, 1, True, 4096, 1.0))
        assert "rank 1 is not between" in trainer.call(refused)[0]
        error, _ = trainer.call(JoinTrainer({"e": 1}, OpenTransfer("127.0.0.1", free_port(), 1, 2, True, 4096, 1.0)))
        assert "no group of 2 members at 127.0.0.1:" in error and time.monotonic() - since < 10
        assert "no group of 2 members" in trainer.start() or "no trainer" in trainer.start()


def test_a_zeroed_draft_is_named_within_ten_seconds_and_text_stays(pair: Pair, other: Version) -> None:  # noqa: F811
    """Target and draft change together: no fault. The draft alone is zeroed: named, until its weights come again."""
    drafts = tensors_of(other.eagle)
    with local_engine(started_with(pair, other, "plain")) as engine:
        texts = [text for text, _ in answers_of(engine, pair.prompts[:4], "x")]
    with local_engine(pair.spec(pair.chain())) as engine:
        check = engine.scheduler.weights.draft
        trainer = Trainer(engine)
        together = tensors_of(other.target) | {f"draft.{name}": tensor for name, tensor in drafts.items()}
        assert trainer.join() == trainer.start() == trainer.update(together) == trainer.finish()[0] == ""
        assert [text for text, _ in answers_of(engine, pair.prompts[:4], "a")] == texts and not check.fault
        zeroed = {name: torch.zeros_like(tensor) for name, tensor in drafts.items()}
        assert trainer.start("draft") == trainer.update(zeroed) == trainer.finish("zeroed")[0] == ""
        since = time.monotonic()
        assert [text for text, _ in answers_of(engine, pair.prompts[:4], "b")] == texts
        assert check.fault.startswith("since weights zeroed") and time.monotonic() - since < 10
        assert trainer.start("draft") == trainer.update(drafts) == trainer.finish()[0] == ""
        assert [text for text, _ in answers_of(engine, pair.prompts[:4], "c")] == texts and not check.fault


def test_an_idle_engine_names_a_zeroed_draft_by_itself(pair: Pair, other: Version) -> None:  # noqa: F811
    """It runs earlier prompts again, once for each update, and leaves a draft that fits alone."""
    drafts = tensors_of(other.eagle)
    with local_engine(started_with(pair, other, "chain")) as engine:
        canary, check, step = DraftCanary(engine.scheduler), engine.scheduler.weights.draft, engine.step

        def seen() -> Any:
            outputs = step()
            canary.observe(outputs)
            return outputs

        engine.step = seen  # type: ignore[method-assign]
        texts = answers_of(engine, pair.prompts[:4], "a")
        trainer = Trainer(engine)
        assert trainer.join() == ""
        for number, factor in enumerate((1.0, 0.0, 1.0)):
            canary.send_if_due()
            assert not engine.scheduler.num_waiting, "one time for each update, and none without"
            new = {name: tensor * factor for name, tensor in drafts.items()}
            assert trainer.start("draft") == trainer.update(new) == trainer.finish(f"v{number}")[0] == ""
            since, rounds = time.monotonic(), sum(engine.scheduler.stats.accepted_histogram)
            canary.send_if_due()
            assert engine.scheduler.num_waiting == 4
            while engine.scheduler.num_waiting or engine.scheduler.num_running:
                engine.step()
            assert sum(engine.scheduler.stats.accepted_histogram) - rounds >= 16
            assert check.fault.startswith("since weights v1") == (factor == 0) and time.monotonic() - since < 10
        assert answers_of(engine, pair.prompts[:4], "b") == texts
        canary.send_if_due()
        canary.reset()


@pytest.mark.parametrize("count", [25, pytest.param(1000, marks=pytest.mark.slow)])
def test_updates_at_random_moments_beside_streams_leave_the_right_weights(
    pair: Pair,
    other: Version,  # noqa: F811
    count: int,
) -> None:
    """After each, the checksums are those of an engine started with the version; texts of requests that no update met
    are those of their version."""
    draw = random.Random(8)
    versions = [Version(pair.target, pair.eagle), other]
    sums, texts = [], []
    for version in versions:
        with local_engine(started_with(pair, version, "chain")) as engine:
            sums.append(sums_of(engine))
            texts.append([text for text, _ in answers_of(engine, pair.prompts[:4], "x")])
    assert sums[0].keys() == sums[1].keys() and sum(sums[0][name] != sums[1][name] for name in sums[0]) > 10
    sent = [
        tensors_of(each.target) | {f"draft.{name}": tensor for name, tensor in tensors_of(each.eagle).items()}
        for each in versions
    ]
    num_checked = 0
    with local_engine(pair.spec(pair.chain())) as engine:
        trainer, step = Trainer(engine), engine.step
        begun: dict[str, tuple[int, int]] = {}

        def served() -> Any:
            """A step beside which requests come."""
            nonlocal num_checked
            if len(begun) < 4 and draw.random() < 0.3:
                request = Request(f"r{time.monotonic_ns()}", pair.prompts[index := draw.randrange(4)], GREEDY)
                begun[request.request_id] = engine.scheduler.weights.epoch, index
                engine.scheduler.submit(request)
            outputs = step()
            for output in outputs:
                if output.finish_reason is not None:
                    epoch, index = begun.pop(output.request.request_id)
                    if epoch == engine.scheduler.weights.epoch:
                        assert output.request.output == texts[epoch % 2][index]
                        num_checked += 1
            return outputs

        engine.step = served  # type: ignore[method-assign]
        assert trainer.join() == ""
        for number in range(1, count + 1):
            for _ in range(draw.randrange(30)):
                engine.step()
            assert trainer.start() == trainer.update(sent[number % 2]) == trainer.finish()[0] == ""
            assert sums_of(engine) == sums[number % 2]
    assert num_checked > count / 2


def sums_of(engine: LocalEngine) -> dict[str, str]:
    found: list[Any] = []
    engine.scheduler.add_command(SumWeights(), found.append)
    while not found:
        engine.step()
    assert first_error(found[0]) == ""
    sums: dict[str, str] = found[0][0].result.sums
    return sums


def send_two_and_wait(port: int, folder: str) -> None:
    """A trainer's process that sends two tensors."""
    sender = WeightSender("127.0.0.1", port, 2, packed=False, timeout_s=60.0)
    sender.send(dict(list(tensors_of(Path(folder)).items())[:2]))
    time.sleep(60)


def test_a_trainer_that_is_killed_in_a_broadcast_changes_nothing_and_the_next_one_succeeds(
    pair: Pair,
    other: Version,  # noqa: F811
) -> None:
    """Steps go on, the loss is named within seconds, and the weights of the next trainer are whole."""
    new, port = tensors_of(other.target), free_port()
    with local_engine(started_with(pair, other, "plain")) as engine:
        expected = answers_of(engine, pair.prompts[:1], "x")
    context: Any = fresh_processes()
    process = context.Process(target=send_two_and_wait, args=(port, str(other.target)), daemon=True)
    with local_engine(pair.spec()) as engine:
        before = answers_of(engine, pair.prompts[:1], "a")
        trainer = Trainer(engine)
        opened = OpenTransfer("127.0.0.1", port, 1, 2, False, 4096, 60.0)
        assert trainer.call(JoinTrainer({"e": 1}, opened), process.start)[0] == "" == trainer.start()
        killed: list[float] = []

        def kill() -> None:
            time.sleep(0.5)  # two tensors have come, and the third is awaited
            os.kill(process.pid, signal.SIGKILL)
            killed.append(time.monotonic())

        assert "Connection closed by peer" in trainer.update(new, kill)
        assert time.monotonic() - killed[0] < 5
        assert "no weight update is open" in trainer.finish()[0] or "Connection closed" in trainer.finish()[0]
        assert answers_of(engine, pair.prompts[:1], "b") == before and engine.scheduler.weights.epoch == 0
        assert trainer.join() == trainer.start() == trainer.update(new) == trainer.finish()[0] == ""
        assert answers_of(engine, pair.prompts[:1], "c") == expected
    process.join(10)


def test_an_adaptive_engine_names_a_zeroed_draft_and_leaves_it_by_itself(pair: Pair, other: Version) -> None:  # noqa: F811
    """With costs by which speculation pays as long as about one draft token in two rounds is accepted."""

    def plain_share(name: str) -> float:
        """Run requests, and return the share of plain rounds."""
        before = dict(engine.scheduler.stats.steps_by_shape)
        answers_of(engine, pair.prompts[:4], name)
        ran = {key: count - before.get(key, 0) for key, count in engine.scheduler.stats.steps_by_shape.items()}
        return ran.get("plain", 0) / sum(ran.values())

    with local_engine(started_with(pair, other, "tree")) as engine:
        shapes = engine.scheduler._shapes
        assert shapes.adaptive and shapes[0].name == "plain"
        rounds = tuple(RoundCosts((1, 16), (1.5 if index else 1.0,) * 2, (0.0, 0.0)) for index in range(len(shapes)))
        engine.scheduler.use_costs(CostTable(rounds, (0,), (16,), ((1.0,),), (shapes.default,)))
        engine.scheduler._results.step_time = None  # this machine's times do not change the costs
        assert [plain_share(f"a{number}") for number in range(2)][-1] < 0.5
        zeroed = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(other.eagle).items()}
        trainer = Trainer(engine)
        assert trainer.join() == trainer.start("draft") == trainer.update(zeroed) == trainer.finish("zeroed")[0] == ""
        shares = [plain_share(f"b{number}") for number in range(3)]
        assert shares[-1] > 0.8
        assert engine.scheduler.weights.draft.fault.startswith("since weights zeroed")
