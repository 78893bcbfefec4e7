"""The judgement over a run, on runs made up by hand; and one real scenario, the short one, on this machine."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.load.client import HealthSample, Reference, Sent, asks
from tests.load.matrix import SCENARIOS
from tests.load.report import HEAD, plot, row, timeline
from tests.load.sandbox import ROOT, unavailable
from tests.load.scenario import Expect, Load
from tests.load.verdict import Ended, Observed, Usage, figures, growth, stalls

SHORT_LIMIT_S = 280.0  # on two crowded cores


def _done(sent_s: float, first_s: float | None, kind: str = "done", front: str = "a") -> Sent:
    token_s = [] if first_s is None else [first_s]
    return Sent(0, front, sent_s, first_s, (sent_s if first_s is None else first_s) + 1, token_s, kind=kind)


def _health(until_s: int, good: range, front: str = "a") -> list[HealthSample]:
    return [HealthSample(float(s), front, 200 if s in good else 503, 0.01) for s in range(until_s)]


def test_requests_of_a_load_follow_from_its_seed() -> None:
    load = Load(num_distinct=40, malformed=0.5)
    found = asks(load)
    assert len(found) == 40 and found == asks(load) != asks(load, seed=1)
    assert 5 < sum(ask.malformed for ask in found) < 35
    plain = [ask.body for ask in found if not ask.malformed]
    assert all(len(body["prompt"]) <= load.prompts.cap and body["max_tokens"] <= load.answers.cap for body in plain)


def test_stall_is_the_time_in_which_requests_wait_and_none_gets_its_first_token() -> None:
    sent = [_done(1, 1.5), _done(5, 12), _done(6, 12.5), _done(20, 20.5)]
    assert list(stalls(sent, 30)) == [(1, 1.5), (5, 12), (12, 12.5), (20, 20.5)]


def test_failed_requests_prolong_a_stall_until_one_succeeds() -> None:
    sent = [_done(1, 2), _done(4, None, "500"), _done(6, None, "500"), _done(8, 9)]
    assert (4, 9) in list(stalls(sent, 10))
    assert list(stalls(sent[:3], 10))[-1] == (4, 10)


def test_health_is_untrue_while_it_says_200_and_nothing_comes() -> None:
    sent = [_done(1, 2), _done(4, 20)]
    true = Observed(sent, _health(25, range(0, 5)), [(3.0, "kill")], 25)
    assert figures(true, Expect(stall_s=17)).missed == []
    untrue = Observed(sent, _health(25, range(0, 17)), [(3.0, "kill")], 25)
    assert figures(untrue, Expect(stall_s=17)).missed == ["/health 200 for 12.0 s while nothing came (limit 10)"]


def test_front_that_hangs_is_untrue_though_another_answers() -> None:
    sent = [_done(float(s), s + 0.1) for s in range(20)] + [_done(2, None, "silent", "b")]
    health = _health(21, range(21)) + _health(21, range(21), "b")
    (missed,) = figures(Observed(sent, health, [(1.0, "stop")], 21), Expect(errors=frozenset({"silent"}))).missed
    assert missed.startswith("/health 200 for 1")


def test_request_that_waits_in_vain_stalls_nobody_after_the_last_was_sent() -> None:
    sent = [_done(float(s), s + 0.1) for s in range(20)] + [_done(5, None, "silent")]
    observed = Observed(sent, _health(90, range(90)), [(4.0, "power")], 90)
    assert figures(observed, Expect(errors=frozenset({"silent"}), untrue_s=2.0, stall_s=2.0)).missed == []


def test_errors_are_missed_unless_allowed_and_never_long_after_the_fault() -> None:
    sent = [_done(float(s), s + 0.2) for s in range(40)]
    sent += [_done(10, None, "500"), _done(11, None, "refused politely"), _done(35, None, "refused politely")]
    observed = Observed(sent, _health(40, range(40)), [(9.0, "kill")], 41)
    assert figures(observed, Expect()).missed == ["1 x 500", "1 x refused politely later than 15 s after the fault"]
    allowed = figures(observed, Expect(errors=frozenset({"500"}), clean_after_s=30))
    assert allowed.missed == [] and allowed.last_error_s == 1.0


def test_wrong_text_is_never_allowed() -> None:
    sent = [_done(1, 2), _done(2, 3, "wrong text")]
    found = figures(Observed(sent, [], [], 4), Expect(errors=frozenset({"wrong text"})))
    assert found.missed == ["1 wrong texts"]


def test_memory_and_files_are_compared_once_they_have_settled() -> None:
    sent = [_done(float(s), s + 0.1) for s in range(0, 900, 3)]
    usage = [
        (float(s), {"worker": Usage(100 + s / 10 if s < 300 else 131, 20), "proxy": Usage(10, 5)}) for s in range(900)
    ]
    observed = Observed(sent, _health(900, range(900)), (), 900, usage=usage)
    assert growth(observed)["worker"] == (Usage(131, 20), Usage(131, 20))
    assert figures(observed, Expect(growth=0.03)).missed == [] and "worker" in timeline(observed)
    leaks = [(at_s, use | {"worker": Usage(100 + at_s / 10, 20 + int(at_s / 10))}) for at_s, use in usage]
    assert figures(dataclasses.replace(observed, usage=leaks), Expect(growth=0.03)).missed == [
        "worker's memory grew from 133 to 187 MB",
        "worker's descriptors grew from 53 to 106",
    ]
    short = dataclasses.replace(observed, usage=usage[:200], until_s=200)
    assert figures(short, Expect(growth=0.03)).missed == ["memory was watched for 200 s only"]


def test_server_that_should_end_must_end_in_time_and_leave_nothing() -> None:
    sent, expect = [_done(1, 2)], Expect(ends_s=15)
    faults = [(3.0, "kill raylet")]
    assert figures(Observed(sent, [], faults, 9), expect).missed == ["aerie serve did not end (limit 15 s)"]
    late = Observed(sent, [], faults, 9, Ended(1, 20.0, ("haproxy",)))
    assert figures(late, expect).missed == ["aerie serve ended after 20.0 s (limit 15)", "1 processes left behind"]
    assert figures(Observed(sent, [], faults, 9, Ended(1, 5.0, ())), expect).missed == []
    assert "aerie serve ended with 1" in figures(Observed(sent, [], [], 9, Ended(1, 5.0, ())), Expect()).missed


@pytest.mark.parametrize(
    ("tokens", "text", "kind", "said"),
    [
        ([5, 6, 7], "abc", "done", ""),
        ([5, 6], "ab", "cut", ""),
        ([5, 6], "ab", "done", "tokens [5, 6], not [5, 6, 7]"),
        ([5, 5, 6], "abc", "done", "tokens [5, 5, 6], not [5, 6, 7]"),
        ([5, 6, 7, 8], "abc", "left", "tokens [5, 6, 7, 8], not [5, 6, 7]"),
        ([5, 6, 7], "abbc", "done", "text 'abbc', not 'abc'"),
    ],
)
def test_answer_is_compared_as_far_as_it_came(tokens: list[int], text: str, kind: str, said: str) -> None:
    sent = Sent(0, "a", 0.0, tokens=tokens, text=text, kind=kind)
    assert Reference((5, 6, 7), "abc").fault(sent) == said


def test_row_timeline_and_plot_show_the_fault() -> None:
    sent = [_done(1, 1.5), _done(4, None, "500"), _done(6, 7)]
    observed = Observed(sent, _health(8, range(8)), [(3.0, "kill <worker>")], 8)
    scenario = SCENARIOS[0]
    line = row(scenario, figures(observed, scenario.expect), observed)
    assert line.count("|") == HEAD.splitlines()[0].count("|") and "2 / 1 500" in line
    assert "kill <worker>" in timeline(observed).splitlines()[4]
    assert "kill &lt;worker&gt;" in plot(scenario, observed)


def test_scenarios_have_names_of_their_own_and_faults_within_the_load() -> None:
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)
    for scenario in SCENARIOS:
        assert all(fault.at_s < scenario.load.seconds for fault in scenario.faults), scenario.name
        assert [fault.at_s for fault in scenario.faults] == sorted(fault.at_s for fault in scenario.faults)
        assert dataclasses.replace(scenario) == scenario


@pytest.mark.ray
@pytest.mark.slow  # tests.e2e.test_recovery kills a worker, too
@pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it can")
def test_killed_worker_under_load_costs_no_request_and_no_token(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.load", "--only", "short", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SHORT_LIMIT_S)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    result = json.loads((tmp_path / "short.json").read_text())
    assert set(result["figures"]["kinds"]) == {"done"}
    assert "<svg" in (tmp_path / "short.svg").read_text()
