"""What every own class of a target must show: greedy answers equal to transformers', plain, drafted, on two ranks, and
with too few pages for all requests."""

from pathlib import Path

from speculative.config import SpeculativeConfig
from tests.support.tiny_models import make_eagle3
from tests.workers.models.test_targets import by_transformers, by_us, requests_of
from workers.config import ModelSource
from workers.models.loading import read_target_config

CHAIN, TREE = (3, 1, 4), (3, 4, 12)
FEW_PAGES = 40  # of 4 tokens: the longest request takes 27, all of them 54 and more


def check_drafted_answers(target: Path, head: Path, tensor_parallel: int = 2) -> None:
    """Compare rounds with an EAGLE-3 head of random weights: a chain, and a tree on several ranks where requests must
    give way to each other. The head reads the output of the last layer, too."""
    expected = by_transformers(target)
    ids = [0, 2, read_target_config(ModelSource(path=str(target)), 1).num_layers]
    make_eagle3(head, target, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    chain, tree = (SpeculativeConfig(str(head), "eagle3", *shape) for shape in (CHAIN, TREE))
    assert by_us(target, speculative=chain) == expected
    drafted = requests_of(target, tensor_parallel, tree, FEW_PAGES)
    assert [request.output for request in drafted] == expected
    assert sum(request.num_preemptions for request in drafted) > 0
