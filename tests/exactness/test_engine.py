"""The whole loop, enumerated: engine, proposer, models' caches, stopping and streams as a request meets them."""

from functools import partial

import pytest

from foretoken.control.fixed import Fixed
from foretoken.core.context import Context
from foretoken.core.history import History
from foretoken.core.sampling import SamplingLaw
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.toy import ToyModel
from foretoken.propose.base import Proposer
from foretoken.propose.draft_model import DraftModel, DraftModelConfig
from foretoken.propose.growers import TreeKind
from foretoken.propose.suffix import Lookup
from foretoken.verify import choose

from .enumerate import Branching, Text, autoregressive_law, outcomes, total_variation
from .enumerate import Law as TextLaw

LIMIT = 1e-12
PROMPT: Text = (0, 1, 1, 0, 1)


def tree_of(target: ToyModel, tree: TreeKind) -> DraftModel:
    return DraftModel(target.perturbed(0.5), DraftModelConfig(tree=tree, top_k=2))


PROPOSERS = {
    "plain": lambda target: (Proposer(), "block"),
    "draft, block": lambda target: (DraftModel(target.perturbed(0.5)), "block"),
    "draft, token": lambda target: (DraftModel(target.perturbed(0.5)), "token"),
    "draft at its own temperature": lambda target: (
        DraftModel(target.perturbed(0.5), DraftModelConfig(draft_temperature=0.6)),
        "block",
    ),
    "draft by argmax": lambda target: (
        DraftModel(target.perturbed(0.5), DraftModelConfig(draft_temperature=0.0)),
        "block",
    ),
    "tree of likely tokens": lambda target: (tree_of(target, "top_k"), "block"),
    "drawn tree, traversal": lambda target: (tree_of(target, "sampled"), "block"),
    "drawn tree, recursive": lambda target: (tree_of(target, "sampled"), "token"),
    "tree of likely tokens and drawn ones": lambda target: (tree_of(target, "greedy_multi"), "block"),
    "lookup": lambda target: (Lookup(), "block"),
}
LAWS = {
    "plain": SamplingLaw(),
    "greedy": SamplingLaw(temperature=0.0),
    "filters and penalties": SamplingLaw(
        temperature=0.8, top_p=0.95, min_p=0.05, frequency_penalty=0.6, repetition_penalty=1.2, bad_words=((1, 1, 1),)
    ),
}


def generate(engine: Engine, law: SamplingLaw, stopping: Length, streams: Branching) -> Text:
    """One request through a new engine."""
    context = Context(0, list(PROMPT), len(PROMPT), law, streams)  # type: ignore[arg-type]
    engine.add(context, stopping)
    while engine.busy:
        engine.step()
    return tuple(context.tokens[len(PROMPT) :])


def reference(target: ToyModel, law: SamplingLaw, length: int, end: int | None) -> TextLaw:
    def row(text: Text):
        tokens = [*PROMPT, *text]
        return law.probs(target.logits(tokens)[None], [History(tokens, len(PROMPT))])[0]

    return autoregressive_law(row, length, lambda text: text[-1] == end)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("vocab, depth, length, end", [(2, 2, 4, None), (3, 2, 3, 2)])
def test_law_of_the_engine(law, proposer, vocab, depth, length, end):
    target = ToyModel(vocab, order=1, seed=5, sharpness=1.0)

    def run(streams: Branching) -> Text:
        speculation, rejection = PROPOSERS[proposer](target)
        engine = Engine(target, speculation, Fixed(depth), rule=partial(choose, rejection=rejection))
        return generate(engine, LAWS[law], Length(length, () if end is None else (end,)), streams)

    assert total_variation(outcomes(run), reference(target, LAWS[law], length, end)) < LIMIT


class TextEnd(Length):
    """Ends at the tokens ``ends`` once their text is read."""

    def push(self, token: int) -> str | None:
        self.tokens_left -= 1
        return "length" if self.tokens_left == 0 else None

    def read(self, token: int) -> str | None:
        return "stop" if token in self.ends else None


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_law_of_an_engine_that_reads_texts_while_the_next_step_runs(law, proposer):
    target = ToyModel(3, order=1, seed=5, sharpness=1.0)

    def run(streams: Branching) -> Text:
        speculation, rejection = PROPOSERS[proposer](target)
        engine = Engine(target, speculation, Fixed(2), rule=partial(choose, rejection=rejection), ahead=True)
        return generate(engine, LAWS[law], TextEnd(3, (2,)), streams)

    assert total_variation(outcomes(run), reference(target, LAWS[law], 3, 2)) < LIMIT
