"""Images of a plan: how many patches a step encodes, and which pixels it contains."""

import msgspec
import pytest

from aerie.workers.prompt_inputs import Encoding, Image, ImageSizes, PromptInputs
from aerie.workers.scheduling.image_chunks import SHORT_TEXT, STEP_PATCHES, ImageChunks
from aerie.workers.scheduling.latency_budget import StepBudget, StepRounds
from aerie.workers.scheduling.plan import Chunk, SamplingParams
from aerie.workers.scheduling.queues.tenants import Tenants
from aerie.workers.scheduling.request import Owner, Request
from aerie.workers.scheduling.sequence import Sequence
from aerie.workers.scheduling.step_time import StepTime
from tests.support.simulation.states import COSTS

SIZES = ImageSizes(2, 1, 1 << 20, 4, 1 << 20, 0, 3)
SMALL = Image.of(5, 400, (1, 40, 40), b"a")  # 1,600 patches
SECOND = Image.of(410, 400, (1, 40, 40), b"b")
THIRD = Image.of(820, 400, (1, 40, 40), b"c")
OTHER = Image.of(5, 400, (1, 40, 40), b"e")
IMAGES = {"image_patches": (1600,), "image_ms": (8.0,)}
LARGE = Image.of(5, 2500, (1, 100, 100), b"d")


def sequence_of(*images: Image) -> Sequence:
    request = Request("a", [1] * 3000, SamplingParams(1), inputs=PromptInputs(images=images))
    return Sequence(request, 0, 0.0, Tenants().of(Owner()))


def chunk_of(sequence: Sequence, start: int, count: int) -> Chunk:
    assert sequence.request.inputs is not None
    return Chunk(0, start, b"", -1, inputs=sequence.request.inputs.cut(start, start + count))


def test_a_step_encodes_few_images() -> None:
    three, large, chunks = sequence_of(SMALL, SECOND, THIRD), sequence_of(LARGE), ImageChunks(SIZES)
    assert 3 * SMALL.num_patches > STEP_PATCHES < LARGE.num_patches
    chunks.begin()
    assert chunks.room(three, 0, 2000, 4000) == THIRD.start, "the third one does not fit beside two"
    assert chunks.room(large, 0, 2000, 4000) == 2000, "a large one alone, as it fits no step, after a short text"
    late = sequence_of(msgspec.structs.replace(LARGE, start=SHORT_TEXT + 1))
    assert chunks.room(late, 0, 2000, 4000) == SHORT_TEXT + 1, "a longer text before a large one"
    assert chunks.room(late, 1, 2000, 4000) == 2000
    chunks.take(three, 0, THIRD.start)
    assert chunks.room(large, LARGE.start, 2000, 4000) == 0 and chunks.room(three, THIRD.start, 50, 4000) == 0
    assert chunks.room(sequence_of(SMALL), 0, 100, 4000) == 100, "another request with an image of this plan"


def test_an_image_is_encoded_in_parts_beside_rounds() -> None:
    """1,600 patches take 8 ms in 4 layers, of which a step has room for 5 ms."""
    sizes, costs = msgspec.structs.replace(SIZES, num_blocks=4), msgspec.structs.replace(COSTS, **IMAGES)
    chunks, sequence, other = ImageChunks(sizes), sequence_of(SMALL), sequence_of(OTHER)
    chunks.use_costs(costs)

    def planned(sequence: Sequence, beside: bool = True) -> tuple[int, StepBudget]:
        chunks.begin(beside)
        budget = StepBudget(4000, StepTime(costs, 4), StepRounds(), 5.0)
        chunks.encode(sequence, 5, budget)
        return chunks.room(sequence, 5, 2000, 4000), budget

    room, budget = planned(sequence)
    assert room == 0 and budget.ms_left == pytest.approx(1.0), "two layers"
    assert chunks.finish_plan([])[1] == (Encoding(SMALL, 2),)
    room, _ = planned(other)
    assert chunks.room(other, 0, 2000, 4000) == 0, "a short text waits for its image"
    late = sequence_of(msgspec.structs.replace(OTHER, start=SHORT_TEXT + 1))
    assert chunks.room(late, 0, 2000, 4000) == SHORT_TEXT + 1, "a longer one before its image"
    assert chunks.room(late, 1, 2000, 4000) == 0
    room, budget = planned(sequence)
    assert room == 2000 and budget.ms_left == pytest.approx(1.0), "the rest, and the chunk in the same step"
    assert chunks.finish_plan([])[1] == (Encoding(msgspec.structs.replace(SMALL, data=b"")),)
    assert planned(sequence)[1].ms_left == pytest.approx(5.0), "it is kept"
    planned(other)
    assert chunks.finish_plan([])[1] == (Encoding(OTHER, 2),)
    planned(sequence_of(LARGE))
    assert chunks.finish_plan([])[1] == (Encoding(LARGE, 1),), "at least one layer"
    planned(other, beside=False)
    assert chunks.finish_plan([])[1] == (), "it was abandoned: a step without rounds encodes it whole"
    planned(sequence_of(LARGE), beside=False)
    assert chunks.finish_plan([])[1] == (Encoding(msgspec.structs.replace(LARGE, data=b"")),), "the rest at once"


def test_small_images_are_encoded_together_beside_rounds() -> None:
    """400 patches take 2 ms; a step has room for 5 ms."""
    sizes = msgspec.structs.replace(SIZES, num_blocks=4)
    costs = msgspec.structs.replace(COSTS, image_patches=(400,), image_ms=(2.0,))
    small = [Image.of(5 + 110 * i, 100, (1, 20, 20), bytes([i])) for i in range(3)]
    chunks, sequence = ImageChunks(sizes), sequence_of(*small)
    chunks.use_costs(costs)
    encodings = []
    for expected in (0, 2000):
        chunks.begin(is_mixed=True)
        chunks.encode(sequence, 0, StepBudget(4000, StepTime(costs, 4), StepRounds(), 5.0))
        assert chunks.room(sequence, 0, 2000, 4000) == expected
        encodings.append(chunks.finish_plan([])[1])
    assert encodings == [tuple(map(Encoding, small[:2])), (Encoding(small[2]),)]


def test_chunks_end_beside_images_whose_tokens_see_later_ones() -> None:
    chunks, three = ImageChunks(msgspec.structs.replace(SIZES, whole=True)), sequence_of(SMALL, SECOND, THIRD)
    chunks.begin()
    assert chunks.room(three, 0, 5, 9) == 5 and chunks.room(three, 0, 300, 4000) == 5, "before the first one"
    assert chunks.room(three, 5, 300, 4000) == 400, "more than there is time for"
    assert chunks.room(three, 205, 30, 200) == 200, "the rest, whose first tokens are cached"
    assert chunks.room(three, 5, 300, 399) == 0, "not in this step"
    assert chunks.room(three, 5, 700, 4000) == 405 and chunks.room(three, 5, 805, 4000) == 805
    assert chunks.fitting(three, 5, 300) == 0 and chunks.fitting(three, 5, 700) == 405, "without more pages"
    assert chunks.fitting(three, 1220, 300) == 300


def test_pixels_are_sent_once_until_ranks_are_lost() -> None:
    sequence, chunks = sequence_of(SMALL, SECOND), ImageChunks(SIZES)
    sent, _, encodes = chunks.finish_plan([chunk_of(sequence, 0, 100), chunk_of(sequence, 100, 400)])
    data = [[image.data for image in chunk.inputs.images] for chunk in sent if chunk.inputs is not None]
    assert encodes and data == [[b"a"], [b"", b"b"]]
    sent, _, encodes = chunks.finish_plan([chunk_of(sequence, 0, 900)])
    assert not encodes and sent[0].inputs is not None
    assert [image.data for image in sent[0].inputs.images] == [b"", b""]
    chunks.begin()
    assert chunks.room(sequence, 0, 2000, 4000) == 2000, "kept images take no time"
    chunks.clear()
    assert chunks.finish_plan([chunk_of(sequence, 0, 900)])[2]
