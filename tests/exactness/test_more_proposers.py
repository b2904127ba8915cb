"""Token recycling, drafts with another tokenizer and mixtures: enumerated through the whole loop, and sampled."""

from collections import Counter
from functools import cache

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foretoken.control.fixed import Fixed
from foretoken.control.policy import DraftPolicy
from foretoken.core.context import Context, Exactness
from foretoken.core.streams import Streams, random_seed_from
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.base import Handle
from foretoken.models.toy import ToyModel
from foretoken.propose.base import Proposer
from foretoken.propose.draft_model import DraftModel, DraftModelConfig, ParallelDraftModel
from foretoken.propose.early_exit import SharedCacheDraft
from foretoken.propose.growers import TreeKind
from foretoken.propose.pieces import Pieces
from foretoken.propose.recycling import Recycling, RecyclingConfig
from foretoken.propose.suffix import Lookup
from foretoken.propose.union import Union, UnionMember
from foretoken.propose.vocabulary import Vocabulary, VocabularyConfig

from .enumerate import Branching, Text, outcomes, total_variation
from .gtest import draws_for, g_test
from .test_engine import LAWS, LIMIT, PROMPT, generate, reference

pytestmark = pytest.mark.slow

VOCAB, LENGTH, DELTA = 3, 4, 0.1
TARGET = ToyModel(VOCAB, order=2, seed=9, sharpness=1.0)


def pieces(*tokens: str) -> Pieces:
    """A tokenizer of these tokens; those of two letters are merges."""
    merges = [(token[0], token[1]) for token in tokens if len(token) == 2]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Pieces(PreTrainedTokenizerFast(tokenizer_object=backend))


LETTERS = pieces("a", "b", "c")
PAIRS = pieces("c", "a", "b", "x", "ab", "bb")  # what it reads is cut otherwise as the text grows


def other_tokenizer(algorithm: str, **keys) -> Vocabulary:
    draft = ToyModel(6, order=1, seed=4, sharpness=1.0)
    return Vocabulary(draft, LETTERS, PAIRS, VOCAB, VocabularyConfig(algorithm=algorithm, **keys))


def mixture(tree: TreeKind = "chain") -> Union:
    model = DraftModel(TARGET.perturbed(0.5), DraftModelConfig(tree=tree, top_k=2))
    sources = [
        UnionMember("ngram", Lookup()),
        UnionMember("recycling", Recycling(VOCAB, RecyclingConfig(top_k=2))),
        UnionMember("draft_model", model, max_nodes=2),
    ]
    return Union(sources, DraftPolicy(), "mixture")


def at_once(tree: TreeKind) -> ParallelDraftModel:
    return ParallelDraftModel(TARGET.perturbed(0.5), VOCAB - 1, DraftModelConfig(tree=tree, top_k=2))


class SharedToy(ToyModel):
    """A draft model on the slots of the target."""

    def _check(self, handle: Handle) -> None:
        """Accepts the slots of another model."""


def shared(tree: TreeKind) -> SharedCacheDraft:
    copy = SharedToy(VOCAB, order=2, seed=9, sharpness=1.0).perturbed(0.5)
    return SharedCacheDraft(copy, DraftModelConfig(tree=tree, top_k=2))


PROPOSERS = {
    "recycling": lambda: Recycling(VOCAB, RecyclingConfig(top_k=2)),
    "text of another tokenizer": lambda: other_tokenizer("slem"),
    "shared tokens": lambda: other_tokenizer("tli"),
    "shared tokens, drawn tree": lambda: other_tokenizer("tli", tree="sampled", top_k=2),
    "mixture": mixture,
    "mixture with a drawn tree": lambda: mixture("sampled"),
    "on the target's cache": lambda: shared("chain"),
    "on the target's cache, drawn tree": lambda: shared("sampled"),
    "all levels at once": lambda: at_once("chain"),
    "all levels at once, ranked tree": lambda: at_once("top_k"),
    "all levels at once, drawn tree": lambda: at_once("sampled"),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_law_of_the_engine(proposer: str, law: str) -> None:
    def run(streams: Branching) -> Text:
        return generate(Engine(TARGET, PROPOSERS[proposer](), Fixed(2)), LAWS[law], Length(3, (2,)), streams)

    assert total_variation(outcomes(run), reference(TARGET, LAWS[law], 3, 2)) < LIMIT


def texts(proposer: Proposer, grade: Exactness, count: int, batch: int, law: str = "plain") -> list[Text]:
    """``count`` requests with seeds and depths of their own."""
    engine = Engine(TARGET, proposer, Fixed(3), max_sequences=batch)
    contexts = [
        Context(i, list(PROMPT), len(PROMPT), LAWS[law], Streams(random_seed_from(17, i)), grade, depth=i % 5)
        for i in range(count)
    ]
    for context in contexts:
        engine.add(context, Length(LENGTH if count > 100 else 24))
    while engine.busy:
        engine.step()
    return [tuple(context.tokens[len(PROMPT) :]) for context in contexts]


@pytest.mark.parametrize("proposer", ["shared tokens", "mixture", "mixture with a drawn tree"])
def test_texts_follow_the_targets_law(proposer: str) -> None:
    law = reference(TARGET, LAWS["plain"], LENGTH, None)
    drawn = Counter(texts(PROPOSERS[proposer](), Exactness.DISTRIBUTION, draws_for(law, DELTA), batch=64))
    result = g_test(drawn, law)
    assert result.p_value > 1e-3, result
    assert result.delta <= DELTA, result


@cache
def plain_texts(law: str) -> list[Text]:
    return texts(Proposer(), Exactness.TRAJECTORY, 10, 1, law)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_one_text_per_seed(proposer: str, law: str) -> None:
    for batch in (1, 8):
        assert texts(PROPOSERS[proposer](), Exactness.TRAJECTORY, 10, batch, law) == plain_texts(law)
