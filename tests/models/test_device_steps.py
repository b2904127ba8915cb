"""Steps on a device: few launches, one read-back, and the tokens that the host would choose."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.propose.heads import random_head
from torch import Tensor

from foretoken.control.fixed import Fixed
from foretoken.control.policy import DraftPolicy
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft
from foretoken.core.history import History
from foretoken.core.native import sampling as native
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import Timings
from foretoken.core.streams import Streams
from foretoken.engine.clock import StepClock
from foretoken.engine.loop import Engine
from foretoken.engine.sequence import OutputOptions
from foretoken.engine.sequence import Sequence as Running
from foretoken.engine.stopping import Length, Stopping
from foretoken.models.base import Scores, no_logits
from foretoken.models.decoder import Decoder
from foretoken.models.device_logits import DeviceRows, DeviceTaps, TappedMemory
from foretoken.models.runners.cuda import choice, runner
from foretoken.models.runners.cuda.changes import ChangeSizes
from foretoken.models.runners.cuda.choice import DeviceChooser
from foretoken.models.runners.cuda.graphs import Graphs, Inputs
from foretoken.models.runners.functional import best
from foretoken.models.runners.triton_kernels.rows import ChainRows, SampledRows, TreeRows
from foretoken.propose.base import Proposer
from foretoken.propose.draft_model import DraftModel, DraftModelConfig
from foretoken.propose.growers import TreeKind
from foretoken.propose.recycling import Recycling
from foretoken.propose.suffix import Lookup
from foretoken.propose.union import Auto, UnionMember
from foretoken.verify import Rule, choose
from gpu import Repeated

from .counted import CPU, CountedDevice, Counts
from .heads.test_drafts_at_once import GATED, HEADS
from .sampled_rows import LAWS
from .test_graphs import META, NothingListed, NothingMixed
from .tiny import ARCHITECTURES, VOCAB

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.kernels() is None, reason="there are no compiled kernels"),
]


class Fetched(DeviceRows):
    """Rows by which the host chooses."""

    chooser = None


class Known(Proposer):
    """Drafts the text of plain decoding, and then a token that is not in it."""

    def __init__(self, texts: Sequence[list[int]]) -> None:
        self.texts = texts

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        following = [self.texts[context.id][len(context.tokens) :] for context in contexts]
        return [self.draft([*ids[: budget - 2], 3], budget) for ids, budget in zip(following, budgets, strict=True)]

    def draft(self, ids: list[int], budget: int) -> Draft:
        return Draft.chain(ids[:budget])


class Forks(Known):
    """Drafts another token first, so that an accepted path is never at its place in the cache."""

    def draft(self, ids: list[int], budget: int) -> Draft:
        return Draft.tree([4, *ids][:budget], [-1, -1, *range(1, len(ids))][:budget])


DRAFTERS = {"plain": lambda texts: Proposer(), "ngram": lambda texts: Lookup(), "known": Known, "forks": Forks}


class Alternating:
    """A grammar that allows even and odd tokens in turn."""

    def allowed(self, history: History) -> Tensor:
        mask = torch.zeros(101, dtype=torch.bool)
        mask[history.generated % 2 :: 2] = True
        return mask


FEW = SamplingLaw(0.1, allowed_ids=tuple(range(5, 70)), min_tokens=6, end_ids=(9, 20), frequency_penalty=0.3)
PHRASES = SamplingLaw(0.1, bad_words=[(20, 4), (7,)], logit_bias=((20, 1.0),), presence_penalty=0.2)
TEXTS = {
    "greedy": (SamplingLaw(temperature=0.0), Exactness.DISTRIBUTION),
    "sampled": (SamplingLaw(temperature=0.05, top_p=0.99), Exactness.DISTRIBUTION),
    "coupled": (SamplingLaw(temperature=0.05), Exactness.TRAJECTORY),
    "filtered": (SamplingLaw(temperature=0.7, top_k=12, min_p=0.01), Exactness.DISTRIBUTION),
    "penalties": (LAWS["penalties"].with_temperature(0.1), Exactness.TRAJECTORY),
    "unscaled": (SamplingLaw(temperature=1.0), Exactness.DISTRIBUTION),
    "changes": (LAWS["changes"].with_temperature(0.1), Exactness.TRAJECTORY),
    "few tokens": (FEW, Exactness.TRAJECTORY),
    "phrases": (PHRASES, Exactness.TRAJECTORY),
    "grammar": (SamplingLaw(0.0, grammar=Alternating()), Exactness.DISTRIBUTION),
    "sampled, penalties": (LAWS["penalties"], Exactness.DISTRIBUTION),
    "sampled, few tokens": (replace(FEW, temperature=1.0), Exactness.DISTRIBUTION),
    "sampled, phrases": (replace(PHRASES, temperature=1.0), Exactness.DISTRIBUTION),
    "unscaled coupled": (SamplingLaw(temperature=1.0), Exactness.TRAJECTORY),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ARCHITECTURES["llama"].save(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def device() -> Iterator[CountedDevice]:
    with pytest.MonkeyPatch.context() as patch:
        yield CountedDevice(patch)


def add(
    engine: Engine,
    number: int,
    text: str,
    length: int = 24,
    logprobs: int | None = None,
    prompt: int = 9,
    stopping: Stopping | None = None,
) -> None:
    law, exactness = TEXTS[text]
    tokens = [(number + 3 * i) % 17 + 20 for i in range(prompt)]
    context = Context(number, tokens, prompt, law, Streams(5 + number), exactness)
    engine.add(context, stopping or Length(length), OutputOptions(logprobs))


def counted(device: CountedDevice, engine: Engine) -> list[Counts]:
    """Runs an engine to its end. Returns the counts of its steps."""
    steps = []
    while engine.busy:
        with device.step() as counts:
            engine.step()
        steps.append(replace(counts))
    return steps


def finished(
    device: CountedDevice,
    model: Decoder,
    text: str,
    proposer: Proposer,
    logprobs: int | None,
    length: int = 24,
    rule: Rule = choose,
) -> tuple[list[Running], list[Counts]]:
    """Returns two finished sequences and the counts of their steps."""
    engine = Engine(model, proposer, Fixed(5), rule=rule)
    for number in range(2):
        add(engine, number, text, length, logprobs)
    steps = counted(device, engine)
    return [engine.take(number) for number in range(2)], steps


CHANGED = ["penalties", "changes", "few tokens", "phrases", "grammar"]


@pytest.mark.parametrize("text", ["greedy", "sampled", "coupled", "unscaled coupled", *CHANGED])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_step_is_three_launches_and_one_read(
    text: str, logprobs: int | None, path: Path, device: CountedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = device.model(path)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "DeviceRows", Fetched)
        expected, _ = finished(device, model, text, Proposer(), logprobs)
    texts = [each.context.tokens for each in expected]
    for name, drafter in DRAFTERS.items():
        result, steps = finished(device, model, text, drafter(texts), logprobs)
        greedy, moved = text == "greedy" and logprobs is None, name == "forks"
        for step in steps:
            assert step.reads == 1 and step.waits == 0 and step.launches <= 3, (name, step)
            assert step.copies <= step.launches <= 2 - greedy + moved, (name, step)
        if name == "plain" or text != "sampled":
            assert [each.context.tokens for each in result] == texts
            assert [each.recorded for each in result] == [each.recorded for each in expected]
        assert name in ("plain", "ngram") or sum(each.counts.accepted for each in result) > 10


STOPS: dict[str, dict[str, Any]] = {
    "margin": {"rule": "margin", "threshold": 0.05},
    "entropy": {"rule": "entropy", "threshold": 0.2},
    "learned": {"rule": "learned", "threshold": 0.7},
}


def proposer_of(drafter: str, device: CountedDevice, path: Path, folder: Path) -> Proposer:
    """Returns a model's or head's proposer on the device."""
    name, _, tree = drafter.partition(": ")
    with device.building():
        if (head := name.removesuffix(", ended")) in HEADS | GATED:
            return (HEADS | GATED)[head](
                folder, {"tree": tree} | ({"confidence_threshold": 0.05} if head != name else {})
            )
        if name == FEWER:
            fewer = ARCHITECTURES["llama"]
            fewer = replace(fewer, config=fewer.config | {"vocab_size": VOCAB - 11})
            return DraftModel(device.model(fewer.save(folder / "fewer")), DraftModelConfig(tree), VOCAB)  # type: ignore[arg-type]
        model, stop = device.model(path), STOPS.get(name.removeprefix("draft model, "))
        if stop and stop["rule"] == "learned":
            stop = {**stop, "model": random_head(folder / "stop", model.hidden_size)}
        return DraftModel(model, DraftModelConfig(tree, top_k=2, draft_stop=stop))  # type: ignore[arg-type]


FEWER = "draft model of fewer tokens"
MODELS = [
    "draft model: chain",
    "draft model: top_k",
    "EAGLE-3, few tokens: chain",
    "EAGLE-3: top_k",
    "MTP: chain",
    "MTP, two layers: chain",
]
SAMPLED_TREES = [*map(": ".join, product(("draft model", "EAGLE-3"), ("sampled", "greedy_multi")))]
OTHERS = [
    "EAGLE 3.1: chain",
    "DSpark: chain",
    "DSpark, gated: chain",
    "DSpark, gated: top_k",
    "DSpark, few tokens: top_k",
    "DFlash: top_k",
    "JetSpec: chain",
    "P-EAGLE: chain",
    "P-EAGLE: top_k",
]
STOPPED = [*(f"draft model, {stop}: chain" for stop in STOPS), "DSpark, ended: chain", "DSpark, gated, ended: chain"]


@pytest.mark.parametrize(
    "drafter, text",
    [
        *product(MODELS, ("greedy", "sampled", "filtered", "unscaled")),
        *product([*OTHERS, *STOPPED, f"{FEWER}: chain"], ("greedy", "filtered", "unscaled")),
        *product(("draft model: top_k", "EAGLE-3: top_k"), ("coupled", "unscaled coupled")),
        *product([*SAMPLED_TREES, f"{FEWER}: sampled"], ("filtered", "unscaled")),
        *product(("draft model: ranked", "EAGLE-3: at_once"), ("greedy, filtered", "unscaled, greedy")),
        *product((*SAMPLED_TREES, "MTP, two layers: sampled"), ("greedy, filtered, coupled",)),
    ],
)
def test_a_step_with_a_draft_of_a_model_is_three_launches_and_one_read(
    drafter: str, text: str, path: Path, device: CountedDevice, tmp_path: Path
) -> None:
    """A step that captures a graph moves the rows of accepted trees by one launch more.

    Several texts are of alternate sequences. Greedy and coupled ones have ranked trees then, and others chains or
    sampled trees, which share a graph.
    """
    texts = text.split(", ")
    model, proposer = device.model(path), proposer_of(drafter, device, path, tmp_path)
    for batch, length in ((1, 9), (8, 4), (32, 3), (128, 3)):
        engine = Engine(model, proposer, Fixed(3), max_sequences=128)
        for number in range(batch):
            add(engine, number, texts[number % len(texts)], length, prompt=3)
        steps = counted(device, engine)
        assert all(s.launches <= 3 + s.captures and s.reads == 1 and not s.waits for s in steps), (batch, steps)
        least = 1 if drafter in STOPPED else batch
        assert sum(engine.take(number).counts.drafted for number in range(batch)) >= least


class Reading(Length):
    """Reads texts, which end at some tokens, and notes the device's counts then."""

    def __init__(self, length: int, device: CountedDevice, ends: Sequence[int] = ()) -> None:
        super().__init__(length)
        self._device, self._ends, self.seen = device, ends, list[tuple[int, int]]()

    def read(self, token: int) -> str | None:
        self.seen.append((self._device.counts.reads, self._device.counts.launches))
        return "stop" if token in self._ends else None


AHEAD = [*MODELS[:4], "DSpark: chain", "draft model: sampled", "EAGLE-3: greedy_multi"]


@pytest.mark.parametrize(
    "drafter, text",
    [
        *product(AHEAD[:5], ("greedy", "filtered", "unscaled", "penalties")),
        *product(AHEAD[5:], ("filtered", "unscaled")),
    ],
)
def test_texts_are_read_while_the_device_computes_the_next_step(
    drafter: str, text: str, path: Path, device: CountedDevice, tmp_path: Path
) -> None:
    """A step is read, the next one is launched, and then texts are read, of which one ends in the middle."""
    model, proposer = device.model(path), proposer_of(drafter, device, path, tmp_path)
    assert model.runs_ahead
    texts: list[list[list[int]]] = []
    for ahead in (False, True):
        engine = Engine(model, proposer, Fixed(3), ahead=ahead)
        ends = texts[0][1][12:14] if texts else ()
        stoppings = [Reading(9, device, ends * (number == 1)) for number in range(3)]
        for number, stopping in enumerate(stoppings):
            add(engine, number, text, logprobs=2, stopping=stopping)
        steps = counted(device, engine)
        assert all(s.launches <= 3 + s.captures and s.reads <= 1 and not s.waits for s in steps), steps
        assert [s.reads for s in steps] == ([0] if ahead else []) + [1] * (len(steps) - ahead)
        for stopping in stoppings:  # the last step of a text has up to four tokens
            assert all(reads and launches for reads, launches in stopping.seen[:-4])
        texts.append([engine.take(number).context.tokens for number in range(3)])
    whole, ended = texts
    cut = next(at for at, token in enumerate(whole[1][9:], 10) if token in whole[1][12:14])
    assert ended == [whole[0], whole[1][:cut], whole[2]]


CHANGED_DRAFTS = [*CHANGED, "sampled, penalties", "sampled, few tokens", "sampled, phrases"]
LOOKS = "phrases", "sampled, phrases", "grammar"  # the host looks at drafts, because it alone knows what may follow


@pytest.mark.parametrize(
    "drafter, text",
    [
        *product([*MODELS[:3], "DSpark: chain", *SAMPLED_TREES[::3]], CHANGED_DRAFTS),
    ],
)
def test_changed_logits_of_one_request_keep_the_drafts_of_all_on_the_device(
    drafter: str, text: str, path: Path, device: CountedDevice, tmp_path: Path
) -> None:
    model, proposer = device.model(path), proposer_of(drafter, device, path, tmp_path)
    engine = Engine(model, proposer, Fixed(3))
    for number in range(4):
        add(engine, number, text if number == 2 else "sampled", 6, prompt=3)
    steps = counted(device, engine)
    assert all(s.launches <= 3 + s.captures and not s.waits for s in steps), steps
    assert max(s.reads for s in steps) == 1 + (text in LOOKS)
    assert all(engine.take(number).counts.drafted for number in range(4))


UNCHANGED = ("greedy", "coupled", "unscaled coupled", "sampled", "filtered", "unscaled")


@pytest.mark.parametrize(
    "drafter, text, logprobs",
    [
        *product([*MODELS[:3], "DSpark: chain", "P-EAGLE: top_k"], (*UNCHANGED, *CHANGED_DRAFTS), [None]),
        *product(["draft model: sampled"], (*UNCHANGED, *CHANGED_DRAFTS[-3:]), [None]),
        *product(["draft model: greedy_multi"], (*UNCHANGED[3:], *CHANGED_DRAFTS[-3:]), [None]),
        *product(["draft model: chain", *SAMPLED_TREES[:2]], ("filtered", "sampled, penalties"), [2]),
    ],
)
def test_drafts_that_stay_on_the_device_change_no_token(
    drafter: str,
    text: str,
    logprobs: int | None,
    path: Path,
    device: CountedDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, proposer = device.model(path), proposer_of(drafter, device, path, tmp_path)
    result, steps = finished(device, model, text, proposer, logprobs, 10)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "DeviceRows", Fetched)  # the host chooses and verifies
        patch.setattr(model.runner, "takes_unread", False)
        law, grade = TEXTS[text]
        other = proposer if grade is Exactness.DISTRIBUTION and not law.greedy else Proposer()
        expected, read = finished(device, model, text, other, logprobs, 10)
    assert [each.context.tokens for each in result] == [each.context.tokens for each in expected]
    assert [each.recorded for each in result] == [each.recorded for each in expected]
    if other is proposer:
        assert [each.counts.accepted for each in result] == [each.counts.accepted for each in expected]
        assert max(s.reads for s in steps) == 1 + (text in LOOKS) and max(s.reads for s in read) > 1
    assert "draft model" not in drafter or sum(each.counts.accepted for each in result) > 3


@pytest.mark.parametrize("text", ["greedy", "unscaled", "unscaled coupled", "sampled, penalties"])
@pytest.mark.parametrize("drafter", STOPPED)
def test_scores_end_chains_on_the_device(
    drafter: str, text: str, path: Path, device: CountedDevice, tmp_path: Path
) -> None:
    """They end where the host, which looks at every token, ends them."""
    model, results = device.model(path), list[list[Running]]()
    for at_once in (True, False):
        proposer = proposer_of(drafter, device, path, tmp_path)
        if isinstance(proposer, DraftModel):
            proposer.model.runner.computes_chains = at_once  # type: ignore[attr-defined]
        elif not at_once:
            proposer.net.vocabulary = None  # type: ignore[attr-defined]
        result, steps = finished(device, model, text, proposer, None, 12)
        results.append(result)
        assert all(s.launches <= 3 + s.captures and s.reads == 1 and not s.waits for s in steps) == at_once, steps
    once, levels = results
    assert [each.counts.by_output for each in once] == [each.counts.by_output for each in levels]
    assert [each.context.tokens for each in once] == [each.context.tokens for each in levels]
    assert [each.counts.drafted for each in once] == [each.counts.drafted for each in levels]
    assert sum(each.counts.drafted for each in once) < 5 * sum(each.counts.steps for each in once)


@pytest.mark.parametrize("depth", [3, None])
@pytest.mark.parametrize("text", ["greedy", "sampled", "unscaled", "coupled", "greedy, unscaled"])
def test_a_union_looks_at_candidates_that_join_copied_text(
    text: str, depth: int | None, path: Path, device: CountedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled chains, and candidates without such text, are passed on unread."""
    monkeypatch.setattr(StepClock, "timings", lambda _, batch, rows: Timings(1e-6, 0.001, 0.0, 0.0, batch, rows))
    model, texts, policy = device.model(path), text.split(", "), DraftPolicy()
    drafter = UnionMember("draft_model", DraftModel(device.model(path)))
    union = Auto([UnionMember("suffix", Lookup()), drafter], policy, "auto")
    policy.bound(4, constant=True)
    policy.costs.calibrate(dict.fromkeys(range(1, 41), 0.001), dict.fromkeys(range(1, 5), 1e-6))
    reads = 1 if text in ("sampled", "unscaled") else 2
    for batch in (1, 8):
        engine, plain = Engine(model, union, policy), Engine(model, Proposer(), Fixed(3))
        for number in range(batch):
            for each in (engine, plain):
                add(each, number, texts[number % len(texts)], 12)
            engine.waiting[-1].context.depth = depth
        steps = counted(device, engine)
        assert all(s.launches <= 3 + s.captures and s.reads <= reads and not s.waits for s in steps), steps
        results, _ = [engine.take(number) for number in range(batch)], counted(device, plain)
        drafted = [each.counts.drafted for each in results]
        assert all(drafted) if depth else any(drafted), drafted
        if text in ("greedy", "coupled"):
            assert all(each.context.tokens == plain.take(n).context.tokens for n, each in enumerate(results))


@pytest.mark.parametrize("text", ["filtered", "unscaled", "sampled, penalties"])
@pytest.mark.parametrize("tree", ["chain", "sampled"])
def test_drafts_that_are_verified_token_by_token_stay_on_the_device(
    tree: TreeKind, text: str, path: Path, device: CountedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DraftModelConfig(tree, top_k=2, draft_temperature=2.0)
    model, proposer = device.model(path), DraftModel(device.model(path), config)
    rule = partial(choose, rejection="token")
    result, steps = finished(device, model, text, proposer, 2, 20, rule)
    monkeypatch.setattr(runner, "DeviceRows", Fetched)
    expected, _ = finished(device, model, text, proposer, 2, 20, rule)
    for one, other in zip(result, expected, strict=True):
        assert (one.context.tokens, one.recorded) == (other.context.tokens, other.recorded)
        assert one.counts.drafted > one.counts.accepted == other.counts.accepted > 0
    assert max(s.reads for s in steps) == 1


@pytest.mark.parametrize("text", ["greedy", "sampled"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_batch_of_eight_beside_a_chunk_of_a_prompt(
    drafter: str, text: str, path: Path, device: CountedDevice
) -> None:
    texts = [[*range(20, 60)]] * 9
    engine = Engine(device.model(path), DRAFTERS[drafter](texts), Fixed(3), prompt_rows=100)
    for number in range(8):
        add(engine, number, text if number % 2 else "sampled", 8)
    with device.step():
        engine.step()
    add(engine, 8, text, 3, prompt=250)
    steps = counted(device, engine)
    assert all(s.launches <= 3 and s.reads == 1 and not s.waits for s in steps), steps
    assert len(engine.take(8).context.tokens) == 253 and len(steps) >= 3


def test_logits_outlive_the_next_pass(path: Path, device: CountedDevice) -> None:
    model = device.model(path)
    first, second = model.open([3, 4, 5]), model.open([7, 8])
    (kept,), (read,) = (model.score([first], [Draft.chain([6])]) for _ in range(2))
    with device.step() as counts:
        model.score([second], [Draft.empty()])
    assert counts.reads == 1  # they may still be read
    assert torch.equal(kept.logits, read.logits) and kept.chooser is None
    del kept, read
    with device.step() as counts:
        model.score([second], [Draft.chain([4])])
    assert counts.reads == 0 and counts.launches == 1


@pytest.mark.parametrize("text", ["greedy", "coupled"])
def test_a_table_of_likeliest_tokens_reads_no_logits_of_greedy_steps(
    text: str, path: Path, device: CountedDevice
) -> None:
    model = device.model(path)
    (expected, _), (result, steps) = (
        finished(device, model, text, proposer, None) for proposer in (Proposer(), Recycling(model.vocab_size))
    )
    assert [each.context.tokens for each in result] == [each.context.tokens for each in expected]
    reads = 1 if text == "greedy" else 2
    assert all(step.reads == reads and step.launches <= 3 and not step.waits for step in steps), steps


@pytest.mark.parametrize("kind", ["device", "host", "argmax"])
def test_rows_of_nodes_that_a_draft_lacks_are_dropped(kind: str) -> None:
    logits, states = torch.randn(5, 7), torch.randn(2, 6, 3)
    rows = DeviceRows(logits, DeviceChooser(Graphs(CPU, Repeated))) if kind == "device" else logits
    taps = DeviceTaps(TappedMemory((1, 4), states), (4, 1), 0, 6)
    argmax = [1, 2, 3, 4, 5] if kind == "argmax" else None
    scores = Scores(no_logits(7) if argmax else rows, taps, argmax=argmax)
    assert scores.of_nodes(4) is scores
    cut = scores.of_nodes(2)
    assert cut.argmax == (argmax and argmax[:3])
    assert argmax or torch.equal(cut.logits, logits[:3])
    assert torch.equal(cut.taps[4], states[1, :4]) and torch.equal(cut.taps[1], states[0, :4])


@pytest.mark.parametrize("ranks", [0, 3, 300])
def test_the_likeliest_tokens_are_those_of_the_host(ranks: int) -> None:
    logits = torch.randn(9, 101, generator=torch.Generator().manual_seed(1)).mul(2.0).round()
    logits[0, 7], logits[1, 3], logits[2], logits[3, :50] = torch.nan, torch.inf, -torch.inf, -0.0
    logits[3, 50:] = 0.0
    kernels = native.kernels()
    assert kernels is not None
    tokens = best(logits, ranks)
    assert tokens[:, 0].tolist() == kernels.best(logits)
    assert tokens[:, 1:].tolist() == kernels.largest(logits, ranks).tolist()


class OnMeta:
    """Stands in for the kernels on tensors without data."""

    @staticmethod
    def gathered(addresses: Tensor, vocabulary: int) -> Tensor:
        return torch.empty(len(addresses), vocabulary, device=META)

    @staticmethod
    def chosen(
        logits: Tensor,
        rows: SampledRows,
        narrow: bool,
        chains: ChainRows | None = None,
        start: int = 0,
        trees: TreeRows | None = None,
    ) -> Tensor:
        return torch.empty(len(logits), 4 if chains or trees else 1, dtype=torch.int64, device=META)

    @staticmethod
    def nodes(addresses: Tensor) -> Tensor:
        return torch.empty(len(addresses), 4, dtype=torch.int64, device=META)

    @staticmethod
    def described(logits: Tensor, tokens: Tensor, ids: Tensor) -> Tensor:
        return torch.cat((tokens[:, None], tokens[:, None], ids, ids), 1)


@pytest.mark.parametrize(
    "unread, sampled, ranks, tokenwise, columns",
    [
        (False, False, 0, False, 11),
        (True, False, 0, False, 14),
        (True, True, 0, False, 19),
        (True, False, 3, False, 19),
        (True, True, 3, True, 19),
    ],
)
def test_captured_choices_never_need_the_host(
    unread: bool, sampled: bool, ranks: int, tokenwise: bool, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "sampling_kernels", lambda: OnMeta)
    bucket = choice.ChoiceBucket(
        rows=128,
        vocabulary=101,
        narrow=True,
        listed=4,
        changes=ChangeSizes(101, 4, 1024, 2, penalized=True),
        width=32,
        depth=8,
        unread=unread,
        sampled=sampled,
        ranks=ranks,
        tokenwise=tokenwise,
    )
    table = torch.zeros(sum(map(math.prod, bucket.shapes)), dtype=torch.int64, device=META)
    with NothingListed(), NothingMixed():
        results = choice._compute(Inputs(table), bucket)[choice.RESULTS]
        tokens = best(torch.empty(64, 101, device=META), 3)
    assert results.shape == (128, columns) and tokens.shape == (64, 4)
