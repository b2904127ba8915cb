"""A recorded target says again what it wrote, and nothing else."""

from __future__ import annotations

import pytest
import torch

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.models.loading import load_model
from foretoken.models.toy import ToyModel
from foretoken.plan.replay import RecordedModel, Recording, record, write
from foretoken.plan.texts import SampledText, teacher_forced

TARGET = ToyModel(vocab_size=6, order=2, seed=3, sharpness=1.5)
WARM = SamplingLaw()


def test_rows_and_states_are_the_texts():
    text = write(TARGET, [[1, 2, 3], [2, 2, 1, 0]], WARM, 70)[1]
    model = RecordedModel(TARGET, record(TARGET, [text], (0, 1)))
    handle, real = model.open(text.prompt), TARGET.open(text.prompt)
    wrong = (text.tokens[0] + 1) % 6
    tree = Draft.tree([text.tokens[0], wrong, text.tokens[1]], (-1, -1, 0))
    for emitted in (text.tokens[:2], text.tokens[2:65]):
        (seen,), (true,) = model.score([handle], [tree], (1,)), TARGET.score([real], [tree], (1,))
        assert seen.first == true.first and seen.logits.shape == true.logits.shape
        assert int(seen.logits[0].argmax()) == text.whole[len(handle.tokens)]
        on_text = [row for row in range(len(seen.taps[1])) if seen.taps[1][row].any()]
        assert torch.equal(seen.taps[1][on_text], true.taps[1][on_text])
        assert len(on_text) >= len(seen.taps[1]) - 1
        model.commit([handle], [emitted])
        TARGET.commit([real], [emitted])
        assert handle.cached == real.cached and handle.tokens == real.tokens
        tree = Draft.chain(list(text.tokens[2:5]))
    TARGET.close(real)


def test_a_law_makes_its_rows_one_hot_whatever_it_asks():
    law = SamplingLaw(temperature=0.01, top_k=2, top_p=0.9, min_p=0.1, repetition_penalty=1.3, presence_penalty=2.0)
    (text,) = write(TARGET, [[1, 2, 3]], law, 12)
    model = RecordedModel(TARGET, [Recording(text)])
    (scores,) = model.score([model.open(text.prompt)], [Draft.chain(list(text.tokens[:5]))])
    context = Context(0, list(text.prompt), 3, law, Streams(0))
    probs = law.probs(scores.logits, context.histories(Draft.chain(list(text.tokens[:5]))))
    assert torch.equal(probs, torch.nn.functional.one_hot(torch.tensor(text.tokens[:6]), 6).float())


def test_texts_of_one_prompt_take_turns_and_others_are_refused():
    texts = [SampledText((1,), (2, 3), 4), SampledText((1,), (4, 5), 4)]
    model = RecordedModel(TARGET, record(TARGET, texts))
    firsts = [int(model.score([model.open([1])], [Draft.empty()])[0].logits.argmax()) for _ in range(3)]
    assert firsts == [2, 4, 2]
    with pytest.raises(InvalidRequest, match="not recorded"):
        model.open([2])


def test_teacher_forcing_says_what_decoding_said():
    (text,) = write(TARGET, [[1, 2, 3]], WARM, 150)
    pieces = list(teacher_forced(TARGET, text, (1,)))
    assert [len(piece.logits) for piece in pieces] == [64, 64, 22]
    logits = torch.cat([piece.logits for piece in pieces])
    assert all(torch.equal(logits[i], TARGET.logits(text.whole[: 3 + i])) for i in range(150))
    taps = torch.cat([piece.taps[1] for piece in pieces])
    assert all(torch.equal(taps[i], TARGET.hidden(text.whole[: i + 1], 1)) for i in range(152))


def test_states_of_a_prompt_are_read_where_its_rows_are_known(tiny_pair):
    """A target that keeps prompts would skip the rows that it has."""
    prompt = [7 + i % 50 for i in range(150)]
    first, kept = load_model(tiny_pair.target), load_model(tiny_pair.target)
    if not kept.enable_prefix_cache(1 << 30):
        pytest.skip("no compiled kernels here")
    (text,) = write(kept, [prompt], WARM, 20)
    again = kept.open(text.prompt)
    assert again.cached > 0
    kept.close(again)
    (own,), (other,) = record(first, [text], (0, 2)), record(kept, [text], (0, 2))
    assert all(len(own.taps[layer]) == len(text.whole) - 1 for layer in (0, 2))
    assert all(torch.equal(own.taps[layer], other.taps[layer]) for layer in (0, 2))
    pairs = zip(teacher_forced(first, text), teacher_forced(kept, text), strict=True)
    assert all(torch.equal(one.logits, two.logits) for one, two in pairs)
