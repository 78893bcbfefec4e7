"""A learned draft through the coordinator to scripted ranks: published, watched, taken back."""

import time

import pytest

from aerie.cluster.coordinator import loop as loop_module
from aerie.cluster.learning.engine_busy import EngineBusy
from aerie.cluster.learning.gate import Candidate
from aerie.cluster.learning.published import PublishedDrafts
from aerie.cluster.transport.admin import InspectDrafts, RollBackDraft
from aerie.workers.runner.commands import CommandHandlers
from aerie.workers.scheduling.commands.command import Folder, LoadedWeights, LoadWeights, Tensors, first_error
from aerie.workers.scheduling.request import Owner
from tests.support.cluster import until
from tests.support.scripted import scripted_output

HOUSEKEEPINGS_S = 0.3  # two have seen what was before


@pytest.fixture
def learning(make_bed, tmp_path, monkeypatch):
    """A bed whose draft learns, and what its ranks have loaded."""
    monkeypatch.setattr(loop_module, "HOUSEKEEPING_S", 0.05)
    bed, loads = make_bed(delay_s=0.002), []
    loop = bed.coordinator._loop
    loop.drafts = PublishedDrafts(bed.scheduler, str(tmp_path), loop.carry_out)
    ranks = bed.new_ranks()

    def load(work):
        loads.append(work)
        return LoadedWeights(dict.fromkeys(work.sources, ()))

    for rank, executor in enumerate(ranks.executors):
        handlers = CommandHandlers(rank)
        handlers.add(LoadWeights, load)
        executor.carry_out = lambda command, handlers=handlers: (handlers.carry_out(command),)
    ranks.start()
    bed.coordinator.attach(ranks.endpoints, 1)
    return bed, loads, tmp_path


def candidate(folder, number, better=True):
    path = folder / f"draft-{number}"
    path.mkdir()
    return Candidate(0.2, 0.1, 0.3, 2.0, 2.4, 20, str(path) if better else "")


def states(bed):
    return {each.name: each.state for each in bed.coordinator.administer(InspectDrafts()).drafts}


def test_texts_reach_the_learner_without_those_that_object(learning):
    bed, _, folder = learning
    bed.generate("a", max_tokens=20, owner=Owner("ann"))
    bed.generate("b", max_tokens=20, owner=Owner("bob", learns=False))
    sampling = bed.generate("c", max_tokens=10)
    for name in "abc":
        bed.ingress.read_end(name)
    news = bed.coordinator.learner_news()
    assert {text.key: len(text.answer) for text in news.texts} == {"ann": 20, "": 10}
    assert news.texts[-1].answer == tuple(scripted_output(5, sampling)) or news.texts[0].key == ""
    assert news.served == str(folder) and bed.coordinator.learner_news().texts == ()
    assert bed.coordinator.stats().num_learned_texts == 2


def test_a_published_draft_changes_neither_version_nor_cached_pages(learning):
    bed, loads, folder = learning
    sampling = bed.generate("q", max_tokens=100)
    until(lambda: bed.coordinator.stats().num_running == 1)
    assert bed.coordinator.offer_draft(candidate(folder, 1, better=False)) == "" and not loads
    assert bed.coordinator.offer_draft(candidate(folder, 2)) == ""
    assert [work.draft for work in loads] == [Folder(str(folder / "draft-2"))] * 2 and loads[0].is_learned
    assert states(bed) == {"0": "former", "2": "served"}
    bed.ingress.read_end("q")
    assert bed.ingress.tokens("q") == scripted_output(5, sampling)
    outcome = bed.coordinator.administer(InspectDrafts())
    assert (outcome.weight_epoch, outcome.version) == (0, "")
    stats = bed.coordinator.stats()
    assert (stats.draft_version, stats.draft_gain, stats.num_draft_candidates) == (2, 0.2, 2)


def test_a_draft_that_accepts_less_is_taken_back_by_itself(learning):
    bed, loads, folder = learning
    bed.coordinator._call(lambda: accept(bed, [0] * 3 + [1000]))
    time.sleep(HOUSEKEEPINGS_S)
    bed.coordinator._call(lambda: accept(bed, [1000, 1000, 1000, 1000]))
    assert bed.coordinator.offer_draft(candidate(folder, 1)) == ""
    bed.coordinator._call(lambda: accept(bed, [10, 400, 0, 0]))
    until(lambda: states(bed) == {"0": "served", "1": "rolled back"})
    assert loads[-1].draft == Folder(str(folder))
    assert bed.coordinator.administer(InspectDrafts()).drafts[1].why == "its acceptance has fallen"
    news = bed.coordinator.learner_news()
    assert (news.num_rollbacks, news.served) == (0, str(folder / "draft-1")), "not decided"
    bed.coordinator._call(lambda: accept(bed, [10, 10, 10, 300]))
    until(lambda: bed.coordinator.learner_news().num_rollbacks == 1)
    assert bed.coordinator.stats().num_draft_rollbacks == 1
    assert states(bed) == {"0": "served", "1": "rolled back"} and bed.coordinator.learner_news().served == str(folder)


@pytest.mark.parametrize("as_little", [[300, 100, 0, 0], [10, 390, 10, 0]], ids=["less", "more, within the noise"])
def test_a_draft_comes_back_if_the_one_before_accepts_as_little_of_the_new_texts(learning, as_little):
    bed, loads, folder = learning
    bed.coordinator._call(lambda: accept(bed, [0] * 3 + [1000]))
    time.sleep(HOUSEKEEPINGS_S)
    bed.coordinator._call(lambda: accept(bed, [1000, 1000, 1000, 1000]))
    assert bed.coordinator.offer_draft(candidate(folder, 1)) == ""
    bed.coordinator._call(lambda: accept(bed, [10, 400, 0, 0]))
    until(lambda: states(bed) == {"0": "served", "1": "rolled back"})
    bed.coordinator._call(lambda: accept(bed, as_little))
    until(lambda: states(bed) == {"0": "former", "1": "served"})
    assert loads[-1].draft == Folder(str(folder / "draft-1")) and bed.coordinator.stats().num_draft_rollbacks == 0
    news = bed.coordinator.learner_news()
    assert (news.num_rollbacks, news.served) == (0, str(folder / "draft-1"))
    bed.coordinator._call(lambda: accept(bed, as_little))
    time.sleep(HOUSEKEEPINGS_S)
    assert states(bed) == {"0": "former", "1": "served"}, "compared with the draft before on the same texts"


@pytest.mark.parametrize("is_gone", [True, False])
def test_an_engine_serves_on_if_the_draft_before_is_gone_or_weights_were_updated(learning, is_gone, caplog):
    bed, loads, folder = learning
    for number in (1, 2):
        bed.coordinator._call(lambda: accept(bed, [1000] * 4))
        time.sleep(HOUSEKEEPINGS_S)
        bed.coordinator._call(lambda: accept(bed, [1000] * 4))
        assert bed.coordinator.offer_draft(candidate(folder, number)) == ""
    if is_gone:
        (folder / "draft-1").rmdir()
    else:
        assert first_error(bed.coordinator.carry_out(LoadWeights(Tensors(()))).result(10)) == ""
    bed.coordinator._call(lambda: accept(bed, [4000]))
    time.sleep(HOUSEKEEPINGS_S)
    assert states(bed) == {"0": "former", "1": "former", "2": "served"} and bed.coordinator.stats().status == "ready"
    assert ("cannot be taken back" in caplog.text) is is_gone


def test_a_draft_that_accepts_as_little_as_the_one_before_stays(learning):
    bed, _, folder = learning
    accepts_little = [400, 4]
    bed.coordinator._call(lambda: accept(bed, accepts_little))
    time.sleep(HOUSEKEEPINGS_S)
    bed.coordinator._call(lambda: accept(bed, accepts_little))
    assert bed.coordinator.offer_draft(candidate(folder, 1)) == ""
    bed.coordinator._call(lambda: accept(bed, [20]))
    bed.coordinator._call(lambda: setattr(bed.scheduler.weights.draft, "fault", "16 rounds accepted none"))
    time.sleep(HOUSEKEEPINGS_S)
    assert states(bed) == {"0": "former", "1": "served"}


def accept(bed, counts):
    """Count rounds that accepted 0, 1, .. draft tokens."""
    histogram = bed.scheduler.stats.accepted_histogram
    histogram += [0] * (len(counts) - len(histogram))
    for k, count in enumerate(counts):
        histogram[k] += count


def test_an_administrator_goes_back_and_what_is_impossible_is_refused(learning):
    bed, loads, folder = learning
    assert bed.coordinator.offer_draft(candidate(folder, 1)) == "" == bed.coordinator.offer_draft(candidate(folder, 2))
    assert "must be one of 0, 1, 2" in bed.coordinator.administer(RollBackDraft("7")).error
    (folder / "draft-1").rmdir()
    assert "is gone" in bed.coordinator.administer(RollBackDraft("1")).error
    assert bed.coordinator.administer(RollBackDraft("0")).error == ""
    assert states(bed) == {"0": "served", "1": "former", "2": "rolled back"}
    sent = LoadWeights(Tensors(()))
    assert first_error(bed.coordinator.carry_out(sent).result(10)) == ""
    assert "weights were updated" in bed.coordinator.offer_draft(candidate(folder, 3))


def test_an_engine_whose_draft_does_not_learn_says_so(make_bed):
    bed = make_bed()
    assert "with the section `learning`" in bed.coordinator.administer(RollBackDraft("0")).error
    assert bed.coordinator.administer(InspectDrafts()).drafts == ()


def test_the_learner_sees_whether_there_are_requests(make_bed, tmp_path):
    path = tmp_path / "of an engine" / "busy"
    bed = make_bed(delay_s=0.01, learning_draft=str(tmp_path), busy_file=str(path))
    busy = EngineBusy(path)
    bed.attach()
    busy.wait_until_idle()
    bed.generate("a", max_tokens=50)
    until(busy.is_set)
    bed.ingress.read_end("a")
    until(lambda: not busy.is_set())
    busy.wait_until_idle()
