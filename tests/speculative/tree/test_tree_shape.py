"""`TreeShape`: its tables agree with each other and with what the scheduler reserves."""

from hypothesis import given
from hypothesis import strategies as st

from aerie.speculative.config import SpeculativeConfig
from aerie.speculative.tree_shape import MAX_COLUMNS, TreeShape, max_nodes
from aerie.workers.config import PLAIN, RoundShapes
from aerie.workers.scheduling.shapes.acceptance import Acceptance

SHAPES = st.tuples(st.integers(1, 8), st.integers(1, 8)).flatmap(
    lambda steps_and_k: st.builds(
        TreeShape.of,
        st.just(steps_and_k[0]),
        st.just(steps_and_k[1]),
        st.just(steps_and_k[0] + 1)
        if steps_and_k[1] == 1
        else st.integers(2, min(MAX_COLUMNS, max_nodes(*steps_and_k))),
    )
)


@given(SHAPES)
def test_steps_propose_every_candidate_once_and_write_the_reserved_positions(shape: TreeShape) -> None:
    steps, next_candidate, written = shape.steps, 0, 0
    for number, step in enumerate(steps):
        assert step.first_candidate == next_candidate and step.depth == number + 1
        assert step.is_last == (number + 1 == len(steps))
        next_candidate += step.rows * shape.top_k
        written += step.rows if number else 0  # draft-extend has written the root's
        assert step.suffix == written
    assert next_candidate == len(shape.candidate_depths) == max_nodes(shape.num_steps, shape.top_k) - 1
    assert written == shape.draft_tokens <= shape.max_kv_tokens


@given(SHAPES)
def test_smaller_shapes_are_smaller_and_possible(shape: TreeShape) -> None:
    widths = [each.width for each in shape.smaller()]
    assert widths == sorted(widths) and all(width < max(shape.width, shape.num_steps + 1) for width in widths)
    for each in shape.smaller():
        SpeculativeConfig("draft", "eagle3", each.num_steps, each.top_k, each.width)  # raises for an impossible one
    assert shape.is_chain == (shape.top_k == 1)


def test_a_blocks_tree_has_chains_and_trees_of_finely_stepped_widths() -> None:
    tree = TreeShape.of(15, 7, 63, in_block=True)
    assert [each.name for each in tree.smaller()] == [
        *("4/1/5", "8/1/9", "15/1/16"),
        *("15/7/16", "15/7/24", "15/7/32", "15/7/48"),
    ]
    short = TreeShape.of(7, 7, 20, in_block=True)
    assert [each.name for each in short.smaller()] == ["2/1/3", "4/1/5", "7/1/8", "7/7/16"]


def test_a_narrow_tree_is_no_chain_to_the_scheduler() -> None:
    """Nodes of one as wide as deep may be siblings: it shares no estimate with chains and is not run beside chunks."""
    chain, narrow = TreeShape.of(2, 1, 3), TreeShape.of(3, 2, 4)
    shapes = RoundShapes((PLAIN, chain, narrow), default=2, adaptive=True)
    acceptance = Acceptance(shapes, 4)
    assert not acceptance.informs(1, 2) and not acceptance.informs(2, 1)
    assert shapes.mixed_shapes(64) == (0, 1)
