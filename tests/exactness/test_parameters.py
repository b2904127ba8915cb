"""Sampling parameters and stop rules under speculation: each node has its own history, each text its end."""

import pytest

from foretoken.core.sampling import SamplingLaw

from .decode_step import Pair, Text, argmax, drawn, drawn_tree, fixed_tree, table, top_plus_tree

LIMIT = 1e-12
P, Q = table(3, seed=11, sharpness=1.5), table(3, seed=12, sharpness=1.5)

LAWS = {
    "temperature": SamplingLaw(temperature=0.6),
    "greedy": SamplingLaw(temperature=0.0),
    "top-k": SamplingLaw(top_k=2),
    "top-p": SamplingLaw(top_p=0.7),
    "min-p": SamplingLaw(min_p=0.3),
    "repetition": SamplingLaw(repetition_penalty=1.8),
    "presence": SamplingLaw(presence_penalty=1.2),
    "frequency": SamplingLaw(frequency_penalty=0.7),
    "negative frequency": SamplingLaw(frequency_penalty=-0.7),
    "logit bias": SamplingLaw(logit_bias=((0, 1.5), (2, -100.0))),
    "allowed tokens": SamplingLaw(allowed_ids=(0, 2), temperature=0.7),
    "bad word": SamplingLaw(bad_words=((2,),)),
    "bad words that straddle": SamplingLaw(bad_words=((0, 1), (1, 1), (2, 0, 0))),
    "min tokens": SamplingLaw(min_tokens=2, end_ids=(1,)),
    "greedy with penalties": SamplingLaw(temperature=0.0, frequency_penalty=1.0, repetition_penalty=1.3),
    "all at once": SamplingLaw(
        temperature=0.8,
        top_k=2,
        top_p=0.95,
        min_p=0.05,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        repetition_penalty=1.3,
        logit_bias=((1, 0.3),),
        bad_words=((1, 2),),
        min_tokens=2,
        end_ids=(0,),
    ),
}

PROPOSERS = {
    "drawn chain": drawn(Q),
    "argmax chain": argmax(Q),
    "fixed tree": fixed_tree((0, 1, 1, 2, 0, 1), (-1, -1, 0, 0, 1, 3)),
    "tree i.i.d.": drawn_tree(Q, (2,), replace=True),
    "tree without replacement": drawn_tree(Q, (2,), replace=False),
    "top plus one": top_plus_tree(Q, (2, 2)),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_the_output_law_is_the_targets_under_every_parameter(law, proposer):
    assert Pair(P, PROPOSERS[proposer], law=LAWS[law], budget=lambda g: 2).gap(length=3) < LIMIT


@pytest.mark.parametrize("law", ["repetition", "bad words that straddle", "all at once"])
def test_the_output_law_is_the_targets_with_token_rejection_too(law):
    assert Pair(P, drawn(Q), law=LAWS[law], rejection="token", budget=lambda g: 2).gap(length=3) < LIMIT


EOS = 1


def until_eos(text: Text, added: Text) -> Text:
    """The tokens of a verdict up to the first EOS."""
    return added[: added.index(EOS) + 1] if EOS in added else added


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("law", ["temperature", "min tokens", "frequency"])
def test_text_up_to_eos(proposer, law):
    pair = Pair(P, PROPOSERS[proposer], law=LAWS[law], budget=lambda g: 2, cut=until_eos)
    assert pair.gap(length=4, ended=lambda text: text[-1] == EOS) < LIMIT


def test_stop_sequence_that_straddles_rounds():
    """The text ends at the first (2, 0), wherever steps begin."""

    def cut(text: Text, added: Text) -> Text:
        whole = text + added
        ends = [i for i in range(len(text), len(whole)) if whole[max(0, i - 1) : i + 1] == (2, 0)]
        return added[: ends[0] - len(text) + 1] if ends else added

    for proposer in ("drawn chain", "fixed tree"):
        pair = Pair(P, PROPOSERS[proposer], budget=lambda g: 2, cut=cut)
        assert pair.gap(length=4, ended=lambda text: text[-2:] == (2, 0)) < LIMIT
