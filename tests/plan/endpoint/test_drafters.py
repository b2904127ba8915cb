"""Other drafters on a server's texts: those that copy, and models from checkpoints here."""

import pytest

from foretoken import zoo
from foretoken.core.errors import InvalidRequest
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.plan.endpoint import LocalModels
from foretoken.plan.endpoint.drafters import copying, predicted_drafters, texts_of
from foretoken.plan.endpoint.outcome import EndpointPredictor
from foretoken.plan.endpoint.statistics import EndpointAcceptance, PassSeconds, SpeedModel
from foretoken.plan.texts import SampledText
from foretoken.probe.answers import ServerAnswer
from foretoken.probe.client import EndpointClient
from foretoken.probe.server import DIALECTS, CannotTellError, ServerKind, Side

SIDE = Side("plain", EndpointClient("http://127.0.0.1:9"), "m", DIALECTS[ServerKind.VLLM])
REPEATING = [SampledText((1, 2, 3 + i), (*range(10, 20), *range(10, 20), *range(10, 20)), 30) for i in range(6)]


def test_texts_are_taken_once_each_and_need_ids():
    answers = [ServerAnswer("ab", ids=(5, 6, 7), prompt_ids=(1, 2 + i // 2)) for i in range(8)]
    assert len(texts_of(SIDE, answers, ["p"] * 8, 2)) == 4
    with pytest.raises(CannotTellError, match="token ids"):
        texts_of(SIDE, [ServerAnswer("ab")] * 8, ["p"] * 8, 2)
    for wrong in (-1, 2**31):
        with pytest.raises(CannotTellError, match="impossible token ids"):
            texts_of(SIDE, [ServerAnswer("ab", ids=(5, wrong), prompt_ids=(1,))] * 8, ["p"] * 8, 2)


def test_text_that_repeats_is_drafted_by_those_that_copy():
    found = {
        (each.name, each.depth): each
        for each in predicted_drafters(REPEATING, 0.0, copying(ServerKind.VLLM), LocalModels())
    }
    assert set(found) == {(name, depth) for name in ("ngram", "suffix") for depth in (2, 4, 8)}
    assert found["ngram", 8].tokens.mean > found["ngram", 2].tokens.mean > 1.3
    assert all(each.free for each in found.values())


@pytest.mark.slow
def test_a_draft_model_and_heads_from_checkpoints():
    target, draft, heads = (str(zoo.path(role)) for role in ("target", "draft", "eagle3"))
    tokenizer = load_tokenizer(zoo.path("target"))
    lines = [
        "def read(path):\n    with open(path) as file:\n        return file.read()\n",
        "import os\nimport sys\nimport json\n",
    ]
    lines += [
        "for i in range(len(values)):\n    print(i, values[i])\n",
        "class Queue:\n    def __init__(self):\n        self.items = []\n",
    ]
    ids = [tokenizer.encode(line) for line in lines]
    texts = [SampledText(tuple(each[:4]), tuple(each[4:]), len(each) - 4) for each in ids]
    models = LocalModels(target, [draft], [heads])
    found = {(each.method, each.depth): each for each in predicted_drafters(texts, 0.0, [], models)}
    assert set(found) == {(method, depth) for method in ("draft_model", "eagle3") for depth in (2, 4, 8)}
    assert found["draft_model", 4].tokens.mean > 1.2 and not found["draft_model", 4].free
    row = EndpointPredictor(ACCEPTANCE, SPEEDS, [found["draft_model", 4]], [1, 4]).other(found["draft_model", 4], 1)
    assert row.speedup is None and row.pays_below is not None
    with pytest.raises(InvalidRequest, match="give the checkpoint of the served model"):
        predicted_drafters([SampledText((1,), (10**6, 2), 2)], 0.0, [], models)


ACCEPTANCE = {4: EndpointAcceptance(4, None, 100.0, ((3.0, 2.0, 5.0), (2.0, 3.0), (1.0, 4.0), (2.0, 2.0)))}
SPEEDS = SpeedModel(
    {1: PassSeconds(0.02, 0.02), 4: PassSeconds(0.021, 0.02)},
    {(4, 1): PassSeconds(0.025, 0.02, 2.5), (4, 4): PassSeconds(0.03, 0.02, 2.5)},
)
