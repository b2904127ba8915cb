"""Rows that are computed when read: every verifier decides as it does over the whole tensor, and reads no more."""

from collections.abc import Sequence

import pytest
import torch

from foretoken.core.context import Context
from foretoken.core.distributions import NodeDistributions
from foretoken.core.draft import Draft, PointMass, ProposalLaw, Sampled, TopPlusSampled, WithoutReplacement
from foretoken.core.history import History
from foretoken.core.native.sampling import Noise
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Purpose, Streams
from foretoken.verify import VERIFIERS

VOCAB = 5
SHAPES = {"chain": (-1, 0, 1), "tree": (-1, -1, 0, 0, 1)}
KINDS = {
    "recursive": WithoutReplacement,
    "traversal": WithoutReplacement,
    "greedy-multi": TopPlusSampled,
    "token": Sampled,
    "block": Sampled,
}
LAWS = {
    "plain": SamplingLaw(),
    "greedy": SamplingLaw(temperature=0.0),
    "filters and penalties": SamplingLaw(temperature=0.7, top_p=0.9, frequency_penalty=0.8, bad_words=((1, 2),)),
}


class Silent:
    """A stream for verdicts that need no random number."""

    def bernoulli(self, p: float, index: int) -> bool:
        raise AssertionError("asked for a coin")

    def categorical(self, weights: torch.Tensor, index: int) -> int:
        raise AssertionError("asked for a draw")


class Recorded(SamplingLaw):
    """A law that notes the rows whose probabilities were computed."""

    def probs(self, logits: torch.Tensor, histories: Sequence[History]) -> torch.Tensor:
        COMPUTED.extend(logits)
        return super().probs(logits, histories)

    def choose(self, logits: torch.Tensor, histories: Sequence[History], noise: Noise) -> int:
        COMPUTED.extend(logits)
        return super().choose(logits, histories, noise)

    def chances(self, logits: torch.Tensor, histories: Sequence[History], tokens: Sequence[int]) -> list[float]:
        before = len(COMPUTED)
        result = super().chances(logits, histories, tokens)
        del COMPUTED[before:]  # single probabilities are no rows
        return result


COMPUTED: list[torch.Tensor] = []


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def draft_for(rule: str, shape: str, seed: int) -> Draft:
    parents = SHAPES[shape]
    tokens = torch.randint(VOCAB, (len(parents),), generator=torch.Generator().manual_seed(seed))
    q = numbers(len(parents) + 1, VOCAB, seed=seed + 1000).softmax(-1)
    law: ProposalLaw = KINDS[rule](q) if rule in KINDS else PointMass()
    return Draft(tuple(tokens.tolist()), parents, law)


def rows_of(law: SamplingLaw, draft: Draft, logits: torch.Tensor) -> tuple[torch.Tensor, NodeDistributions]:
    context = Context(0, [0, 1], 1, law, Streams(0))
    whole = law.probs(logits, context.histories(draft))
    return whole, NodeDistributions(law, logits, lambda row: context.history_at(draft, row))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", VERIFIERS)
def test_the_verdict_is_that_over_the_tensor(rule, shape, law):
    for seed in range(40):
        draft = draft_for(rule, shape, seed)
        whole, rows = rows_of(LAWS[law], draft, numbers(len(draft) + 1, VOCAB, seed=seed + 2000))
        streams = Streams(seed)
        stream = streams.shared(3) if rule == "coupled" else streams.private(Purpose.VERIFY, 3)
        assert VERIFIERS[rule](draft, rows, stream) == VERIFIERS[rule](draft, whole, stream)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", ["walk", "coupled"])
def test_greedy_walks_need_no_numbers_and_no_rows(rule, shape):
    for seed in range(40):
        draft = draft_for(rule, shape, seed)
        _, rows = rows_of(Recorded(temperature=0.0), draft, numbers(len(draft) + 1, VOCAB, seed=seed))
        COMPUTED.clear()
        VERIFIERS[rule](draft, rows, Silent())
        assert not COMPUTED


@pytest.mark.parametrize("rule", ["walk", "token", "block", "recursive", "traversal"])
def test_rows_below_what_the_target_forbids_are_not_read(rule):
    """The first drafted token has p = 0: whatever comes after it is no question."""
    logits = numbers(4, VOCAB, seed=1)
    logits[0, 2] = -torch.inf
    q = torch.full((3, VOCAB), 1 / VOCAB)
    draft = Draft.chain([2, 1, 3], PointMass() if rule == "walk" else Sampled(q))
    _, rows = rows_of(Recorded(), draft, logits)
    COMPUTED.clear()
    assert VERIFIERS[rule](draft, rows, Streams(1).private(Purpose.VERIFY, 0)).path == ()
    assert len(COMPUTED) == 1 and torch.equal(COMPUTED[0], logits[0])
