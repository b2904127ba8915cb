"""Drafts of all levels in one CUDA graph: those of a pass for each level, with one launch and one read-back."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.graphed import on_graphs
from tests.models.heads import blocks, tiny
from tests.models.heads.test_drafts_at_once import CONFIGS, PENALIZED, REQUESTS, Request, drafts, same_drafts
from tests.models.heads.test_drafts_at_once import HEADS as HEADS_BY_NAME
from tests.models.plain import text
from tests.models.test_graphs import META, Guarded, States
from tests.models.test_model_chains import LIMITS, chains, check, opened
from tests.models.tiny import ARCHITECTURES, VOCAB
from tests.propose.test_chains_at_once import CASES
from tests.propose.test_chains_at_once import drafts as model_drafts

from foretoken.control.fixed import Fixed
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Elsewhere
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import PrivateStream, SharedStream, Streams
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models import device_drafts
from foretoken.models.base import Model
from foretoken.models.chains import ChainEnd, ChainRequest, DraftStop, DraftVocabulary, Draws, ModelChain, TreeShape
from foretoken.models.decoder import Decoder
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.checkpoint import load_config, open_weights
from foretoken.models.formats.layers import Layers, Source, read_ends
from foretoken.models.heads.block import read_block
from foretoken.models.heads.block_net import BlockNet
from foretoken.models.loading import load_model
from foretoken.models.runners.cuda import drafts as cuda_drafts
from foretoken.models.runners.cuda.runner import CudaRunner
from foretoken.propose.base import Proposer
from foretoken.propose.draft_model import DraftModel, DraftModelConfig
from foretoken.propose.remote_wire import DraftReply, decode, encode
from foretoken.propose.scores import margin

from .test_graphs import Draft, plan

pytestmark = pytest.mark.slow

HEADS = (
    "EAGLE-3, few tokens",
    "EAGLE 3.1",
    "EAGLE-1",
    "P-EAGLE",
    "DFlash",
    "JetSpec",
    "DSpark, few tokens",
    "DSpark, gated",
    "MTP",
    "MTP, two layers",
)
SAMPLED_TREES = "EAGLE-3, few tokens", "P-EAGLE", "MTP, two layers"
FILTERED = SamplingLaw(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ARCHITECTURES["llama"].save(tmp_path_factory.mktemp("llama"))


def llama(folder: Path) -> Decoder:
    model = load_model(folder, "float32", "cpu", "native")
    assert isinstance(model, Decoder) and isinstance(model.runner, CudaRunner) and model.drafts_chains
    return model


def drawn(stream: PrivateStream | SharedStream, count: int, law: SamplingLaw = FILTERED) -> ChainRequest:
    if isinstance(stream, SharedStream):
        return ChainRequest(count, Draws(law.kept, keys=stream.keys(count)))
    return ChainRequest(count, Draws(law.kept, uniforms=stream.uniforms(count), rows=True))


@pytest.mark.parametrize(
    "head, config, request_of",
    [
        *product(HEADS, ("chain", "tree", "wide tree"), [REQUESTS["drawn"]]),
        *product(SAMPLED_TREES, ("sampled tree", "greedy_multi tree"), [REQUESTS["drawn"], PENALIZED]),
    ],
)
def test_heads_draft_as_level_by_level(head: str, config: str, request_of: Request, tmp_path: Path) -> None:
    once, levels = (
        drafts(tmp_path, CONFIGS[config], head, at_once, on_graphs(), request_of) for at_once in (True, False)
    )
    same_drafts(once, levels, 1e-6)


@pytest.mark.parametrize("case", [name for name, (*_, at_once) in CASES.items() if at_once])
def test_draft_models_draft_as_level_by_level(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, requests, vocab, _ = CASES[case]
    with on_graphs() as recorders:
        model = llama(folder)
        once = model_drafts(model, config, requests, vocab, rounds=5)
        assert recorders[0].replayed > 0
        monkeypatch.setattr(type(model), "drafts_chains", False)
        levels = model_drafts(model, config, requests, vocab, rounds=5)
    assert [draft.levels for draft in once] == [draft.levels for draft in levels]
    same_drafts(once, levels, 1e-6)


def test_a_step_is_one_launch_and_one_read_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[torch.Tensor] = []
    monkeypatch.setattr(device_drafts, "fetched", lambda tensor: (read.append(tensor), tensor)[1])
    with on_graphs() as recorders:
        model = llama(folder)
        handles = opened(model)
        for step in range(4):
            assert len(read) == step
            list(chains(model, handles))
            model.commit(handles, [[5 + step]] * len(handles))
        tree = [ChainRequest(6, tree=TreeShape(3, 4, 1.0))] * 3
        for _ in range(3):
            list(model.chains(handles, tree, VOCAB))
    (recorder,) = recorders
    assert (recorder.captured, recorder.replayed, len(read)) == (2, 7, 7)


def test_the_cache_is_left_as_drafting_by_levels_leaves_it(folder: Path) -> None:
    with on_graphs():
        model = llama(folder)
        handles = opened(model)
        check(model, handles)
        grown = chains(model, handles)
        for handle in handles:
            handle.read()
        assert [handle.nodes for handle in handles] == [chain.tokens[:-1] for chain in grown]
        accepted = [chain.tokens[:count] for chain, count in zip(grown, (3, 0, 7), strict=True)]
        model.commit(handles, [[*tokens, 5] for tokens in accepted])
        for i, tokens in enumerate(accepted):
            fresh = model.open([*handles[i].tokens[: -len(tokens) - 1], *tokens, 5])
            expected = model.score([fresh], [Draft.chain([8, 9])])[0].logits
            assert torch.equal(model.score([handles[i]], [Draft.chain([8, 9])])[0].logits, expected)


def test_chains_end_below_their_minimum_and_where_no_token_is_possible(folder: Path) -> None:
    with on_graphs():
        model = llama(folder)
        handles = opened(model)
        whole = chains(model, handles)
        end = ChainEnd((0.02, 0.9), (0.1, 0.2, 0.3), (0.5, 0.7, 0.6), (0.0, 0.0, 2.0))
        grown = chains(model, handles, ends=[end, end, None])
        assert [(len(chain.tokens), chain.ended) for chain in grown] == [(2, True), (1, False), (7, False)]
        assert grown[0].candidates == whole[0].tokens[:3]
        with torch.inference_mode():
            model.runner._norm.weight.fill_(torch.nan)  # type: ignore[attr-defined]
        assert chains(model, handles) == [ModelChain([], ended=True)] * 3
        requests = [
            drawn(PrivateStream(3), 4),
            ChainRequest(4, tree=TreeShape(3, 4, 1.0)),
            drawn(SharedStream(3, 0), 4),
        ]
        assert all(chain.ended and not chain.tokens for chain in model.chains(handles, requests, VOCAB))


def test_a_draft_does_not_depend_on_its_batch(folder: Path) -> None:
    tree, sampled = ChainRequest(9, tree=TreeShape(4, 3, 0.7)), drawn(PrivateStream(1), 5)
    requests = [tree, sampled, ChainRequest(7), drawn(SharedStream(1, 2), 4), tree, ChainRequest(2)]
    for width, kind in product((2, 3), ("sampled", "greedy_multi")):
        requests += [replace(sampled, tree=TreeShape(width, 3, kind=kind)), ChainRequest(6, tree=TreeShape(width, 3))]
    with on_graphs():
        model = llama(folder)
        handles = [model.open(text(3 + 40 * (i % 6), i)) for i in range(len(requests))]
        together = model.chains(handles, requests, VOCAB)
        for handle, request, chain in zip(handles, requests, together, strict=True):
            (alone,) = model.chains([handle], [request], VOCAB)
            assert (alone.tokens, alone.parents) == (chain.tokens, chain.parents)
            assert alone.probabilities == chain.probabilities
            assert (alone.rows is None) == (chain.rows is None)
            if alone.rows is not None:
                assert isinstance(alone.rows, Elsewhere) and isinstance(chain.rows, type(alone.rows))
                assert torch.equal(alone.rows.probs, chain.rows.probs)


def test_many_sequences_share_a_draft(folder: Path) -> None:
    request = ChainRequest(2)
    with on_graphs():
        model = llama(folder)
        handles = [model.open(text(3 + i % 5, i)) for i in range(130)]
        together = model.chains(handles, [request] * 130, VOCAB)
        assert model.chains(handles[127:129], [request] * 2, VOCAB) == together[127:129]


@pytest.mark.parametrize("tree", ["chain", "ranked", "top_k"])
def test_texts_do_not_depend_on_the_drafts(tree: Any, folder: Path, tmp_path: Path) -> None:
    laws = [
        (SamplingLaw(temperature=0.0), Exactness.DISTRIBUTION),
        (SamplingLaw(temperature=0.9), Exactness.TRAJECTORY),
    ]

    def texts(model: Model, proposer: Proposer, length: int) -> list[list[int]]:
        engine = Engine(model, proposer, Fixed(length))
        contexts = [Context(i, text(5 + i, i), 5 + i, law, Streams(i), grade) for i, (law, grade) in enumerate(laws)]
        for context in contexts:
            engine.add(context, Length(20))
        while engine.busy:
            engine.step()
        return [context.tokens for context in contexts]

    with on_graphs():
        model, draft = llama(folder), llama(folder)
        with torch.inference_mode():
            draft.runner._embedding[: VOCAB // 2] *= 0.5  # type: ignore[attr-defined]  # drafts some other tokens
        plain = texts(model, Proposer(), 0)
        assert texts(model, DraftModel(draft, DraftModelConfig(tree, top_k=3)), 5) == plain
        assert texts(model, DraftModel(draft, DraftModelConfig(tree, top_k=2, num_steps=1)), 5) == plain
        assert texts(model, HEADS_BY_NAME["EAGLE-3, few tokens"](tmp_path, {"tree": tree}), 6) == plain


@pytest.mark.parametrize("tree", ["chain", "top_k"])
def test_drafts_on_the_device_are_scored_again_and_sent_to_others(tree: Any, folder: Path) -> None:
    law, streams = SamplingLaw(temperature=0.9), Streams(3)
    with on_graphs():
        model, proposer = llama(folder), DraftModel(llama(folder), DraftModelConfig(tree, top_k=2))
        contexts = [Context(i, text(5 + i, i), 5 + i, law.with_temperature(0.9 * i), streams) for i in range(2)]
        handles = [model.open(context.tokens) for context in contexts]
        first = proposer.propose(contexts, [3, 3])
        model.score(handles, first)
        again = proposer.propose(contexts, [4, 4])  # the step was given up
        assert all(draft.unread for draft in again)
        scores = model.score(handles, again)
        for context, draft, score in zip(contexts, again, scores, strict=True):
            expected = model.score([model.open(context.tokens)], [draft.read()])[0].logits
            assert len(expected) == 1 + len(draft) and torch.equal(score.logits[: len(expected)], expected)
        sent = decode(encode(tuple(DraftReply(0, 5, (), 4, draft) for draft in proposer.propose(contexts, [4, 4]))))
        same_drafts([draft.read() for draft in again], [reply.draft for reply in sent])


@pytest.mark.parametrize("rows", [64, 256])
def test_first_passes_of_many_rows_are_captured(rows: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_graphs() as recorders:
        model = llama(folder)
        expected = chains(model, opened(model))
        monkeypatch.setattr(cuda_drafts, "FEW_ROWS", rows)
        captured, lengths = recorders[0].captured, (90,) if rows == 256 else (90, 130)
        for length in lengths:
            handles = [model.open(text(n, i)) for i, n in enumerate((9, 30, 1))] + [model.open(text(length, 5))]
            grown = model.chains(handles, [ChainRequest(limit) for limit in (*LIMITS, 3)], VOCAB)
        assert recorders[0].captured == captured + 1  # 130 and 170 rows are both padded to 256
        for one, other in zip(grown, expected, strict=False):
            assert one == other


class Blank(Guarded):
    """Results of captures on the meta device, all zero."""

    def capture(self, function: Callable[[], States]) -> Callable[[], States]:
        states = super().capture(function)()
        return lambda: {number: torch.zeros_like(state, device="cpu") for number, state in states.items()}


TREE = ChainRequest(12, tree=TreeShape(4, 3, 0.7))
CAPTURED = {
    "greedy": [ChainRequest(5), ChainRequest(3)],
    "sampled": [drawn(PrivateStream(1), 5, SamplingLaw()), ChainRequest(3)],
    "filtered and raced": [drawn(PrivateStream(1), 5), drawn(SharedStream(1, 2), 4)],
    "trees": [TREE, TREE],
    "trees and chains": [TREE, drawn(PrivateStream(1), 5)],
    "sampled trees": [
        replace(drawn(PrivateStream(1), 9), tree=TreeShape(3, 4, kind="sampled")),
        replace(drawn(PrivateStream(1), 6, SamplingLaw()), tree=TreeShape(3, 2, kind="sampled")),
    ],
    "ended by scores": [
        replace(drawn(PrivateStream(1), 4), stop=DraftStop(lambda rows: margin(rows.probs), 0.3)),
        ChainRequest(3),
    ],
    "several kinds": [TREE, replace(drawn(PrivateStream(1), 9), tree=TreeShape(3, 4, kind="sampled"))],
    "greedy_multi trees": [replace(drawn(PrivateStream(1), 9), tree=TreeShape(3, 4, kind="greedy_multi"))] * 2,
}


@pytest.mark.parametrize("requests", CAPTURED.values(), ids=CAPTURED)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_captured_drafts_never_need_the_host(family: str, requests: list[ChainRequest], tmp_path: Path) -> None:
    path = ARCHITECTURES[family].save(tmp_path)
    architecture = Architecture.of(load_config(path))
    source = Source(open_weights(path), architecture, torch.float16)
    with on_graphs():
        graphed = CudaRunner(architecture, Layers(source), read_ends(source), torch.float16, META, capture=Blank)
        assert [graphed.acquire(), graphed.acquire()] == [(0, 0), (1, 0)]
        rows = plan((0, 300, 1, Draft.empty()), (1, 7, 2, Draft.empty()))
        ids = torch.arange(0, VOCAB, 2, dtype=torch.int32)
        for vocabulary in (DraftVocabulary(VOCAB, VOCAB), DraftVocabulary(len(ids), VOCAB, ids)):
            assert len(graphed.chains(rows, requests, vocabulary)) == 2


def test_captured_blocks_never_need_the_host(tmp_path: Path) -> None:
    """Rows whose keys and values are injected share the graph of the block."""
    head = read_block(tiny.save(tmp_path, *blocks.dspark(rank=32, block=6)))
    with on_graphs(Blank):
        net = BlockNet(head, torch.zeros(VOCAB, 64), torch.float16, META, 512)
        handles = [net.open(), net.open()]
        stop = DraftStop(net.confidence, 0.3, hidden=True)
        ended = [replace(request, stop=stop) for request in CAPTURED["sampled"]]
        for requests in (CAPTURED["greedy"], CAPTURED["trees"], CAPTURED["several kinds"], ended):
            for handle, rows in zip(handles, (9, 2), strict=True):
                net.extend(handle, text(rows, 1), torch.empty(rows, 64, dtype=torch.float16, device=META))
            assert len(net.chains(handles, requests, VOCAB)) == 2
            assert not any(handle.pending for handle in handles)


def test_other_models_draft_level_by_level(tmp_path: Path) -> None:
    for name in ("bamba", "qwen3-moe"):
        ARCHITECTURES[name].save(tmp_path / name)
        with on_graphs():
            model: Model = load_model(tmp_path / name, "float32", "cpu", "native")
        assert not model.drafts_chains
