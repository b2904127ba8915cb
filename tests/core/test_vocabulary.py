"""Work over a whole vocabulary: the kernels against torch operators, bit for bit where both compute the same."""

import math
import random
from collections.abc import Iterator

import pytest
import torch

from foretoken.core.context import Context
from foretoken.core.history import History, TokenCounts
from foretoken.core.native import sampling as native
from foretoken.core.restrictions import Grammar
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.engine.sequence import token_logprobs

pytestmark = pytest.mark.skipif(native.kernels() is None, reason="there are no compiled kernels")
SIZES = (2, 31, 1000, 32_768, 49_152)


class Allowing(Grammar):
    """Allows the same tokens everywhere."""

    def __init__(self, mask: torch.Tensor | None) -> None:
        self.mask = mask

    def allowed(self, history: History) -> torch.Tensor | None:
        return self.mask


def logits(size: int, rows: int, rng: random.Random) -> torch.Tensor:
    """Random rows with ties, infinities and, sometimes, NaN."""
    values = (
        torch.randn(rows, size, generator=torch.Generator().manual_seed(rng.randrange(2**30))).mul(8).round().div(2)
    )
    values[torch.rand(rows, size, generator=torch.Generator().manual_seed(rng.randrange(2**30))) < 0.05] = -torch.inf
    if rng.random() < 0.1:
        values[0, rng.randrange(size)] = rng.choice((torch.nan, torch.inf))
    if rng.random() < 0.1:
        values[-1] = -torch.inf
    return values


def random_law(size: int, rng: random.Random) -> SamplingLaw:
    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.sample(range(size), rng.randint(0, min(most, size))))

    def maybe(value: float, default: float) -> float:
        return value if rng.random() < 0.4 else default

    few = rng.choice((None, None, 1, 3, size))
    mask = torch.zeros(size, dtype=torch.bool)
    mask[list(rng.sample(range(size), min(few or 1, size)))] = True
    return SamplingLaw(
        temperature=rng.choice((0.0, 0.7, 1.0)),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        logit_bias=tuple((i, rng.choice((-100.0, -0.3, 0.1, 5.0))) for i in ids(3)),
        allowed_ids=() if rng.random() < 0.7 else ids(4),
        bad_words=[(i,) for i in ids(2)],
        min_tokens=rng.choice((0, 0, 50)),
        end_ids=ids(2),
        grammar=None if few is None else Allowing(mask),
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.slow
def test_kernels_change_logits_as_torch_operators_do(size: int) -> None:
    rng = random.Random(size)
    for _ in range(300 if size < 2000 else 60):
        tokens = [rng.randrange(size) for _ in range(rng.randint(1, 40))]
        prompt = rng.randint(0, len(tokens))
        counts = TokenCounts(prompt)
        paths = [tuple(rng.randrange(size) for _ in range(depth)) for depth in range(rng.randint(1, 4))]
        histories = [History(tokens, prompt, path, counts) for path in paths]
        law, rows = random_law(size, rng), logits(size, len(paths), rng)
        before = rows.clone()
        result = law._scores(rows, histories)
        expected = law._adjust(rows.clone(), histories) if law.adjusts else rows
        assert torch.equal(result.view(torch.int32), expected.view(torch.int32)) or (
            torch.equal(result.isnan(), expected.isnan()) and torch.equal(result.nan_to_num(7), expected.nan_to_num(7))
        ), law
        assert torch.equal(rows.nan_to_num(7), before.nan_to_num(7))  # the model's logits stay as they are


def test_counts_follow_a_sequence_that_grows() -> None:
    rng = random.Random(1)
    tokens, counts = [rng.randrange(300) for _ in range(50)], TokenCounts(20)
    for _ in range(200):
        path = tuple(rng.randrange(300) for _ in range(rng.randint(0, 6)))
        result = History(tokens, 20, path, counts).token_counts()
        expected = History(tokens, 20, path).token_counts()
        assert all((a == b).all() for a, b in zip(result, expected, strict=True))
        listed = [*tokens[20:], *path]
        assert dict(zip(*map(list, result), strict=True)) == {i: listed.count(i) for i in {*tokens, *path}}
        tokens += [rng.randrange(300) for _ in range(rng.randint(0, 5))]


class Unread(list[int]):
    """A list whose tokens are reached by slices alone."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("all tokens were read")


def test_counts_read_only_new_tokens() -> None:
    tokens, counts = Unread([1, 2, 2]), TokenCounts(1)
    for token in (3, 2, 4):
        ids, generated = counts.at(tokens, ())
        assert dict(zip(ids.tolist(), generated.tolist(), strict=True))[2] == tokens.count(2)
        tokens.append(token)


def test_a_rewound_sequence_is_counted_anew() -> None:
    context = Context(0, [1, 2, 3, 3], 1, SamplingLaw(presence_penalty=1.0), Streams(0))
    assert sorted(zip(*map(list, context.history().token_counts()), strict=True)) == [(1, 0), (2, 1), (3, 2)]
    context.rewind([1, 5, 5, 5])
    assert sorted(zip(*map(list, context.history([5]).token_counts()), strict=True)) == [(1, 0), (5, 4)]


def test_ids_beyond_a_row_change_nothing() -> None:
    law = SamplingLaw(presence_penalty=1.0, repetition_penalty=2.0, logit_bias=((70, 3.0), (2, 1.0)), bad_words=[(90,)])
    rows = torch.ones(1, 40)
    changed = law._scores(rows, [History([3, 50, 1000], 1)])
    assert changed.nonzero().shape[0] == 40 and changed[0, [1, 2, 3]].tolist() == [1.0, 2.0, 0.5]


def test_allowed_ids_beyond_a_row_are_ignored() -> None:
    law = SamplingLaw(allowed_ids=(2, 3, 70), min_tokens=5, end_ids=(3, 90))
    rows, history = torch.zeros(1, 40), [History([3], 1)]
    for changed in (law._scores(rows, history), law._adjust(rows.clone(), history)):
        assert (changed[0] > -torch.inf).nonzero().flatten().tolist() == [2]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, 1, 8, 20])
def test_the_largest_logits_come_first_and_lower_ids_first_on_ties(size: int, count: int) -> None:
    kernels = native.kernels()
    assert kernels is not None
    rows = logits(size, 3, random.Random(count))
    rows[1] = torch.arange(size, 0, -1)
    rows[2] = torch.arange(size)
    result = kernels.largest(rows, count).tolist()
    expected = [sorted(range(size), key=lambda i: (not math.isnan(row[i]), -row[i], i)) for row in rows.tolist()]
    assert result == [ids[:count] for ids in expected]


@pytest.mark.parametrize("size", SIZES)
def test_log_probabilities_are_those_of_a_softmax(size: int) -> None:
    row = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 5
    expected = row.double().log_softmax(-1)
    for token in (0, size - 1, int(row.argmax())):
        found = token_logprobs(row, token, 20)
        assert found.logprob == pytest.approx(float(expected[token]), abs=1e-6)
        assert found.rank == int((row > row[token]).sum()) + 1
        assert [i for i, _ in found.top] == expected.topk(min(20, size)).indices.tolist()
        assert [p for _, p in found.top] == pytest.approx(expected.topk(min(20, size)).values.tolist(), abs=1e-6)
    assert math.isnan(token_logprobs(torch.full((size,), torch.nan), 0, 0).logprob)
