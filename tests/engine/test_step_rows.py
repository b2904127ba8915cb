"""Steps have the tokens and log-probabilities that the verifier would choose, whatever fixed candidates are drafted."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretoken.control.fixed import Fixed
from foretoken.core.context import Context, Exactness
from foretoken.core.distributions import NodeDistributions
from foretoken.core.draft import Draft, PointMass, ProposalLaw, Sampled
from foretoken.core.errors import NoTokenAllowed
from foretoken.core.history import History
from foretoken.core.native import sampling as native
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Purpose, Streams
from foretoken.engine import step_rows, verified
from foretoken.engine.loop import Engine
from foretoken.engine.sequence import OutputOptions
from foretoken.engine.sequence import Sequence as Running
from foretoken.engine.stopping import Length
from foretoken.models.base import Handle, Scores
from foretoken.models.toy import ToyModel
from foretoken.propose.base import Proposer
from foretoken.verify import Rule, choose, walk

pytestmark = pytest.mark.skipif(native.kernels() is None, reason="there are no compiled kernels")
LAWS = {
    "plain": SamplingLaw(),
    "filters": SamplingLaw(temperature=0.8, top_k=5, top_p=0.9, min_p=0.01),
    "penalties": SamplingLaw(presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.2),
    "greedy, penalties": SamplingLaw(temperature=0.0, presence_penalty=0.4, logit_bias=((3, 1.0),)),
    "phrases": SamplingLaw(bad_words=[(1, 2), (4,)]),
    "forbidden": SamplingLaw(bad_words=[(2,), (4,)], min_tokens=9, end_ids=(0, 5), allowed_ids=tuple(range(11))),
}
CHOSEN: list[int] = []


class Float32Toy(ToyModel):
    """A toy whose rows the kernels read."""

    def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], taps: Sequence[int] = ()) -> list[Scores]:
        return [replace(scores, rows=scores.logits.float()) for scores in super().score(handles, drafts, taps)]


class Silent(Proposer):
    """Drafts nothing."""

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [Draft.empty() for _ in contexts]


TOY, SILENT = Float32Toy(vocab_size=13, order=2, seed=3, sharpness=2.0), Silent()


class Guesses(Proposer):
    """Trees of likely tokens, some of them twice, of another shape in each step."""

    def __init__(self, model: ToyModel, law: ProposalLaw | None = None) -> None:
        self.model, self.law = model, law

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [self._draft(context.tokens) for context in contexts]

    def _draft(self, tokens: list[int]) -> Draft:
        rng = random.Random(len(tokens))
        ids, parents, paths = list[int](), list[int](), [list(tokens)]
        for node in range(rng.choice((0, 1, 5, 12))):
            parent = rng.randrange(max(-1, node - 4), node)
            likely = self.model.logits(paths[parent + 1]).topk(3).indices.tolist()
            ids.append(rng.choice(likely))
            parents.append(parent)
            paths.append([*paths[parent + 1], ids[-1]])
        return Draft(tuple(ids), tuple(parents), self.law or PointMass())


def by_verifier(*args: Any) -> Any:
    """Returns a verifier that decides as the exact one does, and that nothing takes for it."""
    verifier = choose(*args)
    return lambda draft, probs, stream: verifier(draft, probs, stream)


def finished(
    rule: Rule,
    law: SamplingLaw,
    exactness: Exactness,
    logprobs: int | None,
    proposer: Proposer = SILENT,
    target: ToyModel = TOY,
    seeds: Sequence[int] = (5, 2**127 + 9, -3),
) -> list[Running]:
    engine = Engine(target, proposer, Fixed(12), rule=rule)
    for number, seed in enumerate(seeds):
        context = Context(number, [1, 2, 3 + number], 3, law, Streams(seed), exactness)
        engine.add(context, Length(20 + number), OutputOptions(logprobs))
    while engine.busy:
        engine.step()
    assert not engine._step_rows._rows
    return [engine.take(number) for number in range(len(seeds))]


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the tokens that kernels choose for all sequences at once."""
    choose_all = step_rows.StepRows.choose

    def counted(self: step_rows.StepRows, *args: Any) -> Any:
        tokens = choose_all(self, *args)

        def wait() -> Any:
            rows = tokens()
            CHOSEN.append(sum(row is not None for row in rows))
            return rows

        return wait

    CHOSEN.clear()
    monkeypatch.setattr(step_rows.StepRows, "choose", counted)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("exactness", [Exactness.DISTRIBUTION, Exactness.TRAJECTORY])
@pytest.mark.parametrize("logprobs", [None, 0, 4, 99])
def test_tokens_are_those_of_the_verifier(law: str, exactness: Exactness, logprobs: int | None) -> None:
    expected = finished(by_verifier, LAWS[law], exactness, logprobs)
    assert not any(CHOSEN)
    result = finished(choose, LAWS[law], exactness, logprobs)
    assert sum(CHOSEN) == 20 + 21 + 22
    for one, other in zip(result, expected, strict=True):
        assert one.error is None and one.context.tokens == other.context.tokens
        assert one.recorded == other.recorded


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("exactness", [Exactness.DISTRIBUTION, Exactness.TRAJECTORY])
@pytest.mark.parametrize("logprobs", [None, 4])
def test_tokens_of_drafts_are_those_of_the_verifier(law: str, exactness: Exactness, logprobs: int | None) -> None:
    expected = finished(by_verifier, LAWS[law], exactness, logprobs, Guesses(TOY))
    CHOSEN.clear()
    result = finished(choose, LAWS[law], exactness, logprobs, Guesses(TOY))
    assert LAWS[law].changes_follow_tokens == (law != "phrases")
    assert sum(CHOSEN) == sum(one.counts.steps for one in result) or law == "phrases"
    for one, other in zip(result, expected, strict=True):
        assert one.error is None and one.context.tokens == other.context.tokens
        assert one.recorded == other.recorded and one.counts.accepted == other.counts.accepted
    assert sum(one.counts.accepted for one in result) > 5


@pytest.mark.parametrize("exactness", [Exactness.DISTRIBUTION, Exactness.TRAJECTORY])
@pytest.mark.slow
def test_threads_share_the_rows_of_one_sequence(exactness: Exactness) -> None:
    target = Float32Toy(vocab_size=70_000, order=1, seed=3, sharpness=5.0)
    law = SamplingLaw(temperature=0.6, presence_penalty=0.4, min_tokens=8, end_ids=(3, 4))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        args = law, exactness, 4, Guesses(target), target, (5,)
        (result,), (expected,) = finished(choose, *args), finished(by_verifier, *args)
    finally:
        torch.set_num_threads(before)
    assert result.context.tokens == expected.context.tokens and result.recorded == expected.recorded
    assert result.counts.accepted == expected.counts.accepted > 0


def test_drawn_tokens_stay_with_their_verifier() -> None:
    drawn = Sampled(torch.full((13, 13), 1 / 13))
    finished(choose, SamplingLaw(), Exactness.DISTRIBUTION, None, Guesses(TOY, drawn))
    assert sum(CHOSEN) < 40


class Constant(SamplingLaw):
    """A law of its own: every token is 7."""

    def probs(self, logits: torch.Tensor, histories: Sequence[History]) -> torch.Tensor:
        return torch.zeros_like(logits).index_fill_(1, torch.tensor(7), 1.0)

    def choose(self, logits: torch.Tensor, histories: Sequence[History], noise: native.Noise) -> int:
        return 7


@pytest.mark.parametrize("proposer", [SILENT, Guesses(TOY)])
def test_a_subclass_chooses_its_own_tokens(proposer: Proposer) -> None:
    (result,) = finished(choose, Constant(), Exactness.DISTRIBUTION, None, proposer, seeds=(5,))
    assert result.context.tokens[3:] == [7] * 20 and not any(CHOSEN)


def test_typical_acceptance_stays_with_its_verifier() -> None:
    finished(choose, SamplingLaw(), Exactness.TYPICAL, None)
    assert not any(CHOSEN)


def test_a_sequence_without_a_possible_token_ends_alone() -> None:
    engine = Engine(Float32Toy(vocab_size=13), Silent(), Fixed(0))
    forbids_all = SamplingLaw(allowed_ids=(4,), bad_words=[(4,)])
    for number, law in enumerate((SamplingLaw(), forbids_all)):
        engine.add(Context(number, [1, 2], 2, law, Streams(number)), Length(5))
    while engine.busy:
        engine.step()
    assert "forbid every token" in str(engine.take(1).error)
    assert len(engine.take(0).context.tokens) == 7


@pytest.mark.parametrize("seed", range(40))
def test_greedy_drafts_follow_the_argmax_as_the_verifier_walks(seed: int) -> None:
    """Trees with equal siblings, and rows without a token."""
    numbers = random.Random(seed)
    parents = tuple(numbers.randrange(-1, i) for i in range(12))
    draft = Draft.tree([numbers.randrange(2) for _ in parents], parents)
    argmax = [numbers.choice((0, 0, 0, 1, 1, 1, -1)) for _ in range(13)]
    rows = NodeDistributions(
        SamplingLaw(temperature=0.0), torch.zeros(13, 2), lambda row: pytest.fail("not read"), argmax
    )
    try:
        expected = walk.verify(draft, rows, Streams(0).private(Purpose.VERIFY, 0))
    except NoTokenAllowed:
        expected = None
    assert verified.along(draft, argmax) == expected
