"""The output distribution is the target's under the default method and its policy, and a late decision is caught."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from foretoken.control.ledger import Ledger
from foretoken.control.policy import DraftPolicy
from foretoken.core import devices
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft, Sampled
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.toy import ToyModel
from foretoken.propose import growers
from foretoken.propose.draft_model import DraftModel, DraftModelConfig
from foretoken.propose.suffix import Suffix, SuffixConfig
from foretoken.propose.union import Auto, Merge, Union, UnionMember

from .enumerate import Branching, Text, outcomes, total_variation
from .test_engine import LIMIT, PROMPT, reference

pytestmark = pytest.mark.slow

LAW, LENGTH = SamplingLaw(), 4
TARGET = ToyModel(2, order=2, seed=5, sharpness=2.0)
LAP, ROW, LEVEL = 2.0**-14, 2.0**-12, 2.0**-14  # seconds of a lap, a row, a pass of the draft; their sums are exact
MODELS: dict[str, DraftModelConfig] = {
    "ranked": DraftModelConfig(tree="ranked"),
    "ends early": DraftModelConfig(draft_stop="margin"),
    "argmax": DraftModelConfig(draft_temperature=0.0),
    "sampled tree": DraftModelConfig(tree="sampled", top_k=2),
}


def default(config: DraftModelConfig) -> Auto:
    """Returns the method with a policy that has learned nothing."""
    policy = DraftPolicy()
    policy.bound(3, Ledger(0.005))
    suffix = Suffix(SuffixConfig(suffix_decoding_max_cached_requests=0, suffix_decoding_min_token_prob=0.8))
    sources = [UnionMember("suffix", suffix, 1), UnionMember("draft_model", DraftModel(TARGET.perturbed(0.5), config))]
    return Auto(sources, policy, "auto")


def generate(proposer: Union, streams: Streams | Branching, length: int) -> tuple[Text, list[str]]:
    """Returns a text, and each draft: its number of nodes and its distribution."""
    engine, drafts = Engine(TARGET, proposer, proposer.policy), []
    context = Context(0, list(PROMPT), len(PROMPT), LAW, streams, Exactness.DISTRIBUTION)  # type: ignore[arg-type]
    engine.add(context, Length(length))
    while engine.busy:
        drafts += [f"{len(step.draft)} {type(step.draft.law).__name__}" for step in engine.step()]
    return tuple(context.tokens[len(PROMPT) :]), drafts


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes take the same seconds whenever they are run."""
    now, score = [0.0], ToyModel.score

    def timed(model, handles, drafts, *args):
        now[0] += 4 * ROW + ROW * sum(len(draft) for draft in drafts) if model is TARGET else LEVEL
        return score(model, handles, drafts, *args)

    def perf_counter() -> float:
        now[0] += LAP
        return now[0]

    monkeypatch.setattr(ToyModel, "score", timed)
    monkeypatch.setattr(devices, "time", SimpleNamespace(perf_counter=perf_counter))


@pytest.fixture(params=["ends early"])
def learned(request: pytest.FixtureRequest, machine: None) -> Auto:
    """After some requests."""
    proposer = default(MODELS[request.param])
    for seed in range(4):
        generate(proposer, Streams(seed), 60)
    return proposer


def law(learned: Auto) -> tuple[dict[Text, float], set[str]]:
    seen: set[str] = set()
    suffix = learned.copies[0].proposer
    assert isinstance(suffix, Suffix)
    shared = suffix.store, suffix._kernels, suffix._search  # the store is empty, each search sets its arguments
    kept = {id(part): part for part in shared}

    def run(streams: Branching) -> Text:
        text, drafts = generate(deepcopy(learned, dict(kept)), streams, LENGTH)
        seen.update(drafts)
        return text

    return outcomes(run), seen


@pytest.mark.parametrize("learned", MODELS, indirect=True)
def test_law_of_auto(learned: Auto, request: pytest.FixtureRequest) -> None:
    result, drafts = law(learned)
    expected = {
        "ranked": {"1 Sampled", "2 Sampled", "3 Sampled"},
        "ends early": {"1 Sampled", "2 Sampled", "1 PointMass"},  # the policy chooses copied text for some steps
        "argmax": {"1 PointMass"},
        "sampled tree": {"1 WithoutReplacement", "2 WithoutReplacement", "3 WithoutReplacement"},
    }
    assert expected[request.node.callspec.params["learned"]] <= drafts, drafts
    assert total_variation(result, reference(TARGET, LAW, LENGTH, None)) < LIMIT


# Decisions that see a sampled token


class Late(growers.Chain):
    """Decides by the sampled token whether it stays."""

    __slots__ = ()

    def extend(self, logits: Tensor, hidden: Tensor | None = None) -> None:
        super().extend(logits, hidden)
        if not self.stopped and self.rows and float(self.rows[-1][self.tokens[-1]]) < 0.5:
            self.tokens.pop()
            self.rows.pop()
            self.stopped = True


def likely(draft: Draft) -> int:
    """Returns the number of sampled tokens before the first to which the draft gives less than a half."""
    rows = draft.law.probs if isinstance(draft.law, Sampled) else torch.ones(0)
    return next((i for i, token in enumerate(draft.ids[: len(rows)]) if rows[i, token] < 0.5), len(draft))


class Pruning(Auto):
    """Verifies only the tokens of a sampled chain that the draft gives a probability of a half."""

    def _joined(self, request: Merge, length: int, draft: Draft, batch: int) -> Draft:
        if isinstance(draft.law, Sampled):
            end = likely(draft)
            draft = Draft.chain(draft.tokens[:end], Sampled(draft.law.probs[:end]))
        return super()._joined(request, length, draft, batch)


class Choosing(Auto):
    """Verifies copied text in the place of a sampled chain whose first token is unlikely."""

    def _joined(self, request: Merge, length: int, draft: Draft, batch: int) -> Draft:
        if len(draft) and not likely(draft):
            return super()._joined(request, 0, Draft.empty(), batch)
        return super()._joined(request, length, draft, batch)


def test_a_stop_that_sees_the_sample_is_caught(learned: Auto, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growers, "Chain", Late)
    assert total_variation(law(learned)[0], reference(TARGET, LAW, LENGTH, None)) > 0.02


@pytest.mark.parametrize("learned", ["ranked"], indirect=True)
@pytest.mark.parametrize("union", [Pruning, Choosing])
def test_a_union_that_sees_the_sample_is_caught(learned: Auto, union: type[Auto]) -> None:
    learned.__class__ = union
    assert total_variation(law(learned)[0], reference(TARGET, LAW, LENGTH, None)) > 0.02
