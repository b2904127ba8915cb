"""A grammar in the sampling distribution, enumerated: each node has its own restrictions, with every proposer."""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from foretoken.control.fixed import Fixed
from foretoken.core.context import Exactness
from foretoken.core.history import History
from foretoken.core.sampling import SamplingLaw
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.toy import ToyModel
from foretoken.verify import choose

from .decode_step import Pair, argmax, drawn, drawn_tree, fixed_tree, table, top_plus_tree
from .enumerate import Branching, Text, outcomes, total_variation
from .test_engine import PROPOSERS as ENGINES
from .test_engine import generate, reference
from .test_trajectory import shared, shared_top

LIMIT = 1e-12
END = 3
P, Q = table(4, seed=41, sharpness=1.5), table(4, seed=42, sharpness=1.5)


@dataclass(frozen=True)
class Alternating:
    """Texts whose ids alternate in parity, with each id at most ``most`` times; they may end after two tokens.

    blind: forgets the drafted path, a mistake that must not pass.
    """

    most: int = 1
    blind: bool = False

    def allowed(self, history: History) -> Tensor | None:
        text: list[int] = []
        for token in (*history.tokens[history.prompt_length :], *(() if self.blind else history.path)):
            if END in text or not self._after(text)[token]:
                return None
            text.append(token)
        return None if END in text else self._after(text)

    def _after(self, text: list[int]) -> Tensor:
        counts = Counter(text)
        mask = [counts[t] < self.most and (not text or (t - text[-1]) % 2 == 1) for t in range(END)]
        return torch.tensor([*mask, len(text) >= 2 or not any(mask)])


LAWS = {
    "once each": SamplingLaw(grammar=Alternating()),
    "twice each": SamplingLaw(grammar=Alternating(2)),
    "greedy": SamplingLaw(temperature=0.0, grammar=Alternating(2)),
    "with other parameters": SamplingLaw(
        temperature=0.8,
        top_k=2,
        top_p=0.95,
        frequency_penalty=0.4,
        logit_bias=((2, 100.0),),
        bad_words=((1, 2),),
        min_tokens=4,
        end_ids=(END,),
        grammar=Alternating(2),
    ),
}
PROPOSERS = {
    "drawn chain": drawn(Q),
    "chain drawn without the grammar": drawn(Q, SamplingLaw()),
    "argmax chain": argmax(Q),
    "fixed tree": fixed_tree((0, 1, 1, 2, 0, 3, 2), (-1, -1, 0, 0, 1, 3, 4)),
    "tree i.i.d.": drawn_tree(Q, (2,), replace=True),
    "tree without replacement": drawn_tree(Q, (2, 1), replace=False),
    "tree drawn without the grammar": drawn_tree(Q, (2,), replace=False, law=SamplingLaw()),
    "top plus one": top_plus_tree(Q, (2, 2)),
}


def until_end(text: Text, added: Text) -> Text:
    return added[: added.index(END) + 1] if END in added else added


def ended(text: Text) -> bool:
    return text[-1] == END


@pytest.mark.parametrize("rejection", ["block", "token"])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_the_output_law_is_the_targets_under_every_grammar(law, proposer, rejection):
    pair = Pair(P, PROPOSERS[proposer], law=LAWS[law], rejection=rejection, budget=lambda g: 2, cut=until_end)
    assert pair.gap(length=4, ended=ended) < LIMIT


@pytest.mark.parametrize("proposer", ["drawn chain", "argmax chain", "fixed tree"])
def test_law_of_the_coupled_rule(proposer):
    law, grade = LAWS["once each"], Exactness.TRAJECTORY
    pair = Pair(P, PROPOSERS[proposer], law=law, exactness=grade, budget=lambda g: 2, cut=until_end)
    assert pair.gap(length=4, ended=ended) < LIMIT


@pytest.mark.parametrize("proposer", [shared(Q), shared_top(Q, 3), *PROPOSERS.values()])
def test_text_of_a_seed(proposer):
    def text(depth: int, seed: int) -> Text:
        pair = Pair(P, proposer, law=LAWS["twice each"], exactness=Exactness.TRAJECTORY, budget=lambda g: depth)
        result = pair.text(seed, 3)  # no text ends before
        return result[: result.index(END) + 1] if END in result else result

    assert all(text(depth, seed) == text(0, seed) for depth in (1, 2) for seed in range(8))


def test_everything_that_comes_is_in_the_grammar():
    law = Pair(P, drawn_tree(Q, (2, 1), replace=False), law=LAWS["twice each"], cut=until_end).reference(5, ended)
    for text in law:
        ids = text[:-1] if text[-1] == END else text
        assert all((a - b) % 2 for a, b in pairwise(ids)) and max(Counter(ids).values()) <= 2
        assert text[-1] != END or len(ids) >= 2


def test_a_grammar_that_forgets_the_path_is_caught():
    wrong = SamplingLaw(grammar=Alternating(2, blind=True))
    for proposer in ("drawn chain", "fixed tree"):
        assert Pair(P, PROPOSERS[proposer], law=wrong, budget=lambda g: 2, cut=until_end).gap(3, ended) > 0.01


@pytest.mark.parametrize("law", ["once each", "with other parameters"])
@pytest.mark.parametrize("proposer", ENGINES)
def test_law_of_the_engine(law, proposer):
    target = ToyModel(END + 1, order=1, seed=5, sharpness=1.0)

    def run(streams: Branching) -> Text:
        speculation, rejection = ENGINES[proposer](target)
        engine = Engine(target, speculation, Fixed(2), rule=partial(choose, rejection=rejection))
        return generate(engine, LAWS[law], Length(3, (END,)), streams)

    assert total_variation(outcomes(run), reference(target, LAWS[law], 3, END)) < LIMIT
